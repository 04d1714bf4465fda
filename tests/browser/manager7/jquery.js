// The slider of ipywidgets 7 takes jQuery UI's parts from a loader of AMD modules, or finds them in
// the page. There is no loader in a bundle, so each of them is here before the slider.

export { default as jQuery } from "jquery";
import "jquery-ui/ui/version";
import "jquery-ui/ui/widget";
import "jquery-ui/ui/keycode";
import "jquery-ui/ui/widgets/mouse";
