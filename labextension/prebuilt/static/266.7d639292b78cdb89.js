"use strict";(self.rspackChunkgpumemwidget_lab=self.rspackChunkgpumemwidget_lab||[]).push([[266],{475(e,t,n){var r=n(601),o=n.n(r),a=n(314),i=(n.n(a))()(o());i.push([e.id,`.gml-panel {
  display: flex;
  flex-direction: column;
  overflow: hidden auto;
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

.gml-kernels {
  flex: none;
  padding: 8px 12px 12px;
}

.gml-kernels h3,
.gml-kernels h4 {
  margin: 8px 0 4px;
  font-size: inherit;
}

.gml-kernels h4 {
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
`,""]),n.d(t,{},{A:i})},646(e,t,n){var r=n(601),o=n.n(r),a=n(314),i=n.n(a),l=n(475),s=i()(o());s.i(l.A),s.push([e.id,`
`,""]),n.d(t,{},{A:s})},314(e){e.exports=function(e){var t=[];return t.toString=function(){return this.map(function(t){var n="",r=void 0!==t[5];return t[4]&&(n+="@supports (".concat(t[4],") {")),t[2]&&(n+="@media ".concat(t[2]," {")),r&&(n+="@layer".concat(t[5].length>0?" ".concat(t[5]):""," {")),n+=e(t),r&&(n+="}"),t[2]&&(n+="}"),t[4]&&(n+="}"),n}).join("")},t.i=function(e,n,r,o,a){"string"==typeof e&&(e=[[null,e,void 0]]);var i={};if(r)for(var l=0;l<this.length;l++){var s=this[l][0];null!=s&&(i[s]=!0)}for(var c=0;c<e.length;c++){var p=[].concat(e[c]);r&&i[p[0]]||(void 0!==a&&(void 0===p[5]||(p[1]="@layer".concat(p[5].length>0?" ".concat(p[5]):""," {").concat(p[1],"}")),p[5]=a),n&&(p[2]&&(p[1]="@media ".concat(p[2]," {").concat(p[1],"}")),p[2]=n),o&&(p[4]?(p[1]="@supports (".concat(p[4],") {").concat(p[1],"}"),p[4]=o):p[4]="".concat(o)),t.push(p))}},t}},601(e){e.exports=function(e){return e[1]}},665(e,t,n){n.r(t);var r=n(72),o=n.n(r),a=n(825),i=n.n(a),l=n(659),s=n.n(l),c=n(56),p=n.n(c),u=n(540),d=n.n(u),f=n(113),m=n.n(f),v=n(646),g={};g.styleTagTransform=m(),g.setAttributes=p(),g.insert=s().bind(null,"head"),g.domAPI=i(),g.insertStyleElement=d(),o()(v.A,g);let h=v.A&&v.A.locals?v.A.locals:void 0;n.d(t,{},{default:h})},72(e){var t=[];function n(e){for(var n=-1,r=0;r<t.length;r++)if(t[r].identifier===e){n=r;break}return n}function r(e,r){for(var o={},a=[],i=0;i<e.length;i++){var l=e[i],s=r.base?l[0]+r.base:l[0],c=o[s]||0,p="".concat(s," ").concat(c);o[s]=c+1;var u=n(p),d={css:l[1],media:l[2],sourceMap:l[3],supports:l[4],layer:l[5]};if(-1!==u)t[u].references++,t[u].updater(d);else{var f=function(e,t){var n=t.domAPI(t);return n.update(e),function(t){t?(t.css!==e.css||t.media!==e.media||t.sourceMap!==e.sourceMap||t.supports!==e.supports||t.layer!==e.layer)&&n.update(e=t):n.remove()}}(d,r);r.byIndex=i,t.splice(i,0,{identifier:p,updater:f,references:1})}a.push(p)}return a}e.exports=function(e,o){var a=r(e=e||[],o=o||{});return function(e){e=e||[];for(var i=0;i<a.length;i++){var l=n(a[i]);t[l].references--}for(var s=r(e,o),c=0;c<a.length;c++){var p=n(a[c]);0===t[p].references&&(t[p].updater(),t.splice(p,1))}a=s}}},659(e){var t={};e.exports=function(e,n){var r=function(e){if(void 0===t[e]){var n=document.querySelector(e);if(window.HTMLIFrameElement&&n instanceof window.HTMLIFrameElement)try{n=n.contentDocument.head}catch(e){n=null}t[e]=n}return t[e]}(e);if(!r)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");r.appendChild(n)}},540(e){e.exports=function(e){var t=document.createElement("style");return e.setAttributes(t,e.attributes),e.insert(t,e.options),t}},56(e,t,n){e.exports=function(e){var t=n.nc;t&&e.setAttribute("nonce",t)}},825(e){e.exports=function(e){if("u"<typeof document)return{update:function(){},remove:function(){}};var t=e.insertStyleElement(e);return{update:function(n){var r,o,a;r="",n.supports&&(r+="@supports (".concat(n.supports,") {")),n.media&&(r+="@media ".concat(n.media," {")),(o=void 0!==n.layer)&&(r+="@layer".concat(n.layer.length>0?" ".concat(n.layer):""," {")),r+=n.css,o&&(r+="}"),n.media&&(r+="}"),n.supports&&(r+="}"),(a=n.sourceMap)&&"u">typeof btoa&&(r+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(a))))," */")),e.styleTagTransform(r,t,e.options)},remove:function(){var e;null===(e=t).parentNode||e.parentNode.removeChild(e)}}}},113(e){e.exports=function(e,t){if(t.styleSheet)t.styleSheet.cssText=e;else{for(;t.firstChild;)t.removeChild(t.firstChild);t.appendChild(document.createTextNode(e))}}}}]);