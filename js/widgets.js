// The entry of the bundle: all widgets in one module; a model says which of them it is.

import { createCards } from "./cards.js";
import { createDashboard } from "./dashboard.js";

const WIDGETS = { cards: createCards, dashboard: createDashboard };

/** anywidget calls this once for each model, ``initialize`` once, and ``render`` for each view. */
export default () => {
  let widget = null;
  return {
    initialize(given) {
      widget = WIDGETS[given.model.get("widget")]();
      return widget.initialize(given);
    },
    render: (given) => widget.render?.(given),
  };
};
