// The data, the page's state, and functions that several views use. Everything from the data
// becomes text through `textContent`, so no token can become markup.

const STEPS = 255;
const NUM_COLORS = 8;
const data = JSON.parse(byId("data").textContent);
const maps = new Map(data.maps.map((map) => [map.kind, { ...map, weights: decode(map.weights) }]));
const state = {
  ...data.selection,
  heads: new Set(data.selection.heads),
  // Each is null or a token {side: "queries" or "keys", position}. A pinned token stays selected.
  pinned: null,
  hovered: null,
  focused: null,
};
if (state.position !== null) {
  state.pinned = { side: "queries", position: state.position };
}

function byId(id) {
  return document.getElementById(id);
}

function decode(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** Create an element with attributes and children, which are elements or text. */
function make(name, attributes = {}, ...children) {
  const isSvg = name === "svg" || name === "line";
  const space = isSvg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function colored(name, head, attributes = {}, ...children) {
  const element = make(name, attributes, ...children);
  element.style.setProperty("--color", `var(--head-${head % NUM_COLORS})`);
  return element;
}

const current = () => maps.get(state.kind);
const selected = () => state.hovered ?? state.pinned ?? state.focused;
const activeHeads = () => [...state.heads].sort((a, b) => a - b);

function weight(layer, head, query, key) {
  const { numHeads, queries, keys, weights } = current();
  const row = (layer * numHeads + head) * queries.length + query;
  return weights[row * keys.length + key] / STEPS;
}

function meanWeight(query, key) {
  const heads = activeHeads();
  const sum = heads.reduce((total, head) => total + weight(state.layer, head, query, key), 0);
  return sum / Math.max(1, heads.length);
}
