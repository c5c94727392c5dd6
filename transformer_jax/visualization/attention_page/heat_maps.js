// Heat maps: the grid of all layers and heads, and the alignment of one layer.

function drawGrid() {
  const { numLayers, numHeads } = current();
  const numbers = (count) => [...Array(count).keys()];
  const header = numbers(numHeads).map((head) =>
    colored("th", head, { scope: "col" }, `head ${head + 1}`),
  );
  const rows = numbers(numLayers).map((layer) => {
    const cells = numbers(numHeads).map((head) => make("td", {}, makeCell(layer, head)));
    return make("tr", {}, make("th", { scope: "row" }, `layer ${layer + 1}`), ...cells);
  });
  const head = make("thead", {}, make("tr", {}, make("td"), ...header));
  const table = make("table", { class: "grid" }, head, make("tbody", {}, ...rows));
  table.style.setProperty("--num-heads", numHeads);
  byId("picture").replaceChildren(make("div", { class: "scroll" }, table));
  document.querySelectorAll(".grid canvas").forEach(paint);
  byId("readout").replaceChildren();
}

function makeCell(layer, head) {
  const { queries, keys } = current();
  const canvas = make("canvas", { width: keys.length, height: queries.length });
  Object.assign(canvas.dataset, { layer, head });
  const label = `layer ${layer + 1}, head ${head + 1}`;
  const button = make("button", { type: "button", title: label, "aria-label": label }, canvas);
  button.addEventListener("click", () => {
    Object.assign(state, { layer, heads: new Set([head]), view: "heads" });
    draw();
    byId("view").focus();
  });
  return button;
}

function paint(canvas) {
  const rgb = getComputedStyle(canvas).color.match(/\d+/g).slice(0, 3).map(Number);
  const { width, height, dataset } = canvas;
  const image = new ImageData(width, height);
  for (let query = 0; query < height; query++) {
    for (let key = 0; key < width; key++) {
      const alpha = weight(Number(dataset.layer), Number(dataset.head), query, key) * STEPS;
      image.data.set([...rgb, Math.round(alpha)], 4 * (query * width + key));
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function drawAlignment() {
  const { queries, keys } = current();
  const header = keys.map((key) => make("th", { scope: "col", title: key }, make("bdi", {}, key)));
  const rows = queries.map((query, row) => {
    const cells = keys.map((key, column) => {
      const mean = meanWeight(row, column);
      const fill = make("i");
      fill.style.opacity = mean.toFixed(4);
      return make("td", { "data-query": row, "data-key": column, title: `${mean.toFixed(2)}` }, fill);
    });
    return make("tr", {}, make("th", { scope: "row", title: query }, make("bdi", {}, query)), ...cells);
  });
  const head = make("thead", {}, make("tr", {}, make("td"), ...header));
  const table = make("table", { class: "alignment" }, head, make("tbody", {}, ...rows));
  // A keyboard can scroll the table only if it can get the focus.
  const scroll = make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Heat map" }, table);
  byId("picture").replaceChildren(scroll);
  byId("readout").replaceChildren();
  markRow();
}

/** Highlight the label of the pinned query. */
function markRow() {
  document.querySelectorAll(".alignment tbody th").forEach((label, position) => {
    label.classList.toggle("selected", isSame({ side: "queries", position }, state.pinned));
  });
}

function showCell(target) {
  const cell = target.closest(".alignment td[data-key]");
  if (cell) {
    const { queries, keys } = current();
    const [query, key] = [Number(cell.dataset.query), Number(cell.dataset.key)];
    const words = [make("bdi", {}, queries[query]), " attends to ", make("bdi", {}, keys[key])];
    byId("readout").replaceChildren(...words, `: ${meanWeight(query, key).toFixed(2)}`);
  }
}
