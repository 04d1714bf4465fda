"use strict";(self.rspackChunkgpumemwidget_lab=self.rspackChunkgpumemwidget_lab||[]).push([[266],{475(e,n,t){var o=t(601),r=t.n(o),a=t(314),l=(t.n(a))()(r());l.push([e.id,`.gml-panel {
  display: flex;
  flex-direction: column;
  overflow: hidden auto;
  /* Nothing moves when the bar appears. */
  scrollbar-gutter: stable;
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-family: var(--jp-ui-font-family);
  font-size: var(--jp-ui-font-size1);
}

.gml-head {
  flex: none;
  padding: 8px 12px 4px;
  overflow: hidden;
  font-weight: 600;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.gml-message {
  flex: none;
  padding: 4px 12px 12px;
  color: var(--jp-ui-font-color2);
}

.gml-view {
  flex: none;
  padding: 0 8px;
  overflow: visible;
}

/* The panel alone scrolls. */
.gml-panel .gml-view .gmd-scroll {
  max-height: none;
}

.gml-kernels {
  flex: none;
  padding: 0 12px 6px;
}

.gml-kernels summary {
  cursor: pointer;
}

.gml-kernels h4 {
  margin: 8px 0 4px;
  font-size: inherit;
  color: var(--jp-ui-font-color2);
  font-weight: 400;
}

.gml-kernels ul {
  margin: 0;
  padding: 0;
  list-style: none;
}

.gml-kernels li {
  display: flex;
  gap: 8px;
  align-items: center;
  padding: 1px 0;
}

.gml-kernels li[data-focused] .gml-name {
  font-weight: 600;
}

.gml-name {
  flex: 1;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.gml-bytes {
  font-variant-numeric: tabular-nums;
}

.gml-kernels li[data-old] .gml-bytes {
  color: var(--jp-ui-font-color2);
}

.gml-panel .gml-load {
  display: block;
  margin-top: 8px;
  padding: 4px 12px;
  border-color: var(--jp-brand-color1);
  color: var(--jp-brand-color1);
  font-weight: 600;
}

.gml-panel .gml-load[hidden] {
  display: none;
}

.gml-load,
.gml-kernels button,
.gml-note button {
  padding: 0 6px;
  border: 1px solid var(--jp-border-color1);
  border-radius: 3px;
  background: none;
  color: inherit;
  font: inherit;
  cursor: pointer;
}

.gml-load:hover,
.gml-kernels button:hover,
.gml-note button:hover,
.gml-status button:hover {
  background: var(--jp-layout-color2);
}

.gml-note {
  min-height: 22px;
  padding: 4px 0;
  line-height: 20px;
  color: var(--jp-ui-font-color2);
}

.gml-status button {
  height: 100%;
  padding: 0 6px;
  border: 0;
  background: none;
  color: var(--jp-ui-font-color1);
  font: inherit;
  font-variant-numeric: tabular-nums;
  white-space: nowrap;
  cursor: pointer;
}

.gml-status button[data-over] {
  color: var(--jp-error-color1);
  font-weight: 600;
}
`,""]),t.d(n,{},{A:l})},646(e,n,t){var o=t(601),r=t.n(o),a=t(314),l=t.n(a),i=t(475),s=l()(r());s.i(i.A),s.push([e.id,`
`,""]),t.d(n,{},{A:s})},314(e){e.exports=function(e){var n=[];return n.toString=function(){return this.map(function(n){var t="",o=void 0!==n[5];return n[4]&&(t+="@supports (".concat(n[4],") {")),n[2]&&(t+="@media ".concat(n[2]," {")),o&&(t+="@layer".concat(n[5].length>0?" ".concat(n[5]):""," {")),t+=e(n),o&&(t+="}"),n[2]&&(t+="}"),n[4]&&(t+="}"),t}).join("")},n.i=function(e,t,o,r,a){"string"==typeof e&&(e=[[null,e,void 0]]);var l={};if(o)for(var i=0;i<this.length;i++){var s=this[i][0];null!=s&&(l[s]=!0)}for(var c=0;c<e.length;c++){var p=[].concat(e[c]);o&&l[p[0]]||(void 0!==a&&(void 0===p[5]||(p[1]="@layer".concat(p[5].length>0?" ".concat(p[5]):""," {").concat(p[1],"}")),p[5]=a),t&&(p[2]&&(p[1]="@media ".concat(p[2]," {").concat(p[1],"}")),p[2]=t),r&&(p[4]?(p[1]="@supports (".concat(p[4],") {").concat(p[1],"}"),p[4]=r):p[4]="".concat(r)),n.push(p))}},n}},601(e){e.exports=function(e){return e[1]}},665(e,n,t){t.r(n);var o=t(72),r=t.n(o),a=t(825),l=t.n(a),i=t(659),s=t.n(i),c=t(56),p=t.n(c),u=t(540),d=t.n(u),f=t(113),m=t.n(f),g=t(646),v={};v.styleTagTransform=m(),v.setAttributes=p(),v.insert=s().bind(null,"head"),v.domAPI=l(),v.insertStyleElement=d(),r()(g.A,v);let h=g.A&&g.A.locals?g.A.locals:void 0;t.d(n,{},{default:h})},72(e){var n=[];function t(e){for(var t=-1,o=0;o<n.length;o++)if(n[o].identifier===e){t=o;break}return t}function o(e,o){for(var r={},a=[],l=0;l<e.length;l++){var i=e[l],s=o.base?i[0]+o.base:i[0],c=r[s]||0,p="".concat(s," ").concat(c);r[s]=c+1;var u=t(p),d={css:i[1],media:i[2],sourceMap:i[3],supports:i[4],layer:i[5]};if(-1!==u)n[u].references++,n[u].updater(d);else{var f=function(e,n){var t=n.domAPI(n);return t.update(e),function(n){n?(n.css!==e.css||n.media!==e.media||n.sourceMap!==e.sourceMap||n.supports!==e.supports||n.layer!==e.layer)&&t.update(e=n):t.remove()}}(d,o);o.byIndex=l,n.splice(l,0,{identifier:p,updater:f,references:1})}a.push(p)}return a}e.exports=function(e,r){var a=o(e=e||[],r=r||{});return function(e){e=e||[];for(var l=0;l<a.length;l++){var i=t(a[l]);n[i].references--}for(var s=o(e,r),c=0;c<a.length;c++){var p=t(a[c]);0===n[p].references&&(n[p].updater(),n.splice(p,1))}a=s}}},659(e){var n={};e.exports=function(e,t){var o=function(e){if(void 0===n[e]){var t=document.querySelector(e);if(window.HTMLIFrameElement&&t instanceof window.HTMLIFrameElement)try{t=t.contentDocument.head}catch(e){t=null}n[e]=t}return n[e]}(e);if(!o)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");o.appendChild(t)}},540(e){e.exports=function(e){var n=document.createElement("style");return e.setAttributes(n,e.attributes),e.insert(n,e.options),n}},56(e,n,t){e.exports=function(e){var n=t.nc;n&&e.setAttribute("nonce",n)}},825(e){e.exports=function(e){if("u"<typeof document)return{update:function(){},remove:function(){}};var n=e.insertStyleElement(e);return{update:function(t){var o,r,a;o="",t.supports&&(o+="@supports (".concat(t.supports,") {")),t.media&&(o+="@media ".concat(t.media," {")),(r=void 0!==t.layer)&&(o+="@layer".concat(t.layer.length>0?" ".concat(t.layer):""," {")),o+=t.css,r&&(o+="}"),t.media&&(o+="}"),t.supports&&(o+="}"),(a=t.sourceMap)&&"u">typeof btoa&&(o+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(a))))," */")),e.styleTagTransform(o,n,e.options)},remove:function(){var e;null===(e=n).parentNode||e.parentNode.removeChild(e)}}}},113(e){e.exports=function(e,n){if(n.styleSheet)n.styleSheet.cssText=e;else{for(;n.firstChild;)n.removeChild(n.firstChild);n.appendChild(document.createTextNode(e))}}}}]);