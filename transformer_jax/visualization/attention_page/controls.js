// The controls, and the mouse and keyboard events.

const VIEWS = { heads: drawHeads, grid: drawGrid, alignment: drawAlignment };
const HELP = {
  heads: () =>
    "Point at a token to see only its weights; click it to keep them, and press Escape to " +
    "release it. The arrow keys move between tokens.",
  grid: () => `${axes()} Click a heat map to open its head.`,
  alignment: () =>
    `${axes()} The heat map shows the mean over the selected heads. Point at a cell to read its weight.`,
};

function axes() {
  const { queryLabel, keyLabel } = current();
  return `The rows of a heat map are ${queryLabel}s, and its columns are ${keyLabel}s.`;
}

function fill(select, options, value) {
  select.replaceChildren(...options.map(([key, text]) => make("option", { value: key }, text)));
  select.value = value;
}

function makeHeadButtons() {
  const buttons = [...Array(current().numHeads).keys()].map((head) => {
    const button = colored(
      "button",
      head,
      { type: "button", "aria-pressed": state.heads.has(head), "aria-label": `head ${head + 1}` },
      `${head + 1}`,
    );
    button.addEventListener("click", () => {
      state.heads.has(head) ? state.heads.delete(head) : state.heads.add(head);
      button.setAttribute("aria-pressed", state.heads.has(head));
      drawPicture();
    });
    return button;
  });
  const all = make("button", { type: "button" }, "All heads");
  all.addEventListener("click", () => {
    state.heads = new Set(buttons.keys());
    draw();
    byId("heads").lastChild.focus();
  });
  byId("heads").replaceChildren(...buttons, all);
}

function caption() {
  const { label, numLayers, numHeads } = current();
  if (state.view === "grid") {
    return `${label}, all layers and heads`;
  }
  const numbers = activeHeads().map((head) => head + 1);
  let heads = `head${numbers.length === 1 ? "" : "s"} ${numbers.join(", ")}`;
  if (numbers.length === numHeads) {
    heads = "all heads";
  } else if (numbers.length === 0) {
    heads = "no head is selected";
  }
  const mean = state.view === "alignment" && numbers.length > 1 ? "mean over " : "";
  return `${label}, layer ${state.layer + 1} of ${numLayers}, ${mean}${heads}`;
}

function drawPicture() {
  byId("caption").textContent = caption();
  byId("help").textContent = HELP[state.view]();
  VIEWS[state.view]();
}

/** Draw the controls and the picture. */
function draw() {
  const { numLayers } = current();
  state.hovered = state.focused = null;
  fill(byId("kind"), [...maps].map(([kind, map]) => [kind, map.label]), state.kind);
  const layers = [...Array(numLayers).keys()].map((i) => [i, `${i + 1} of ${numLayers}`]);
  fill(byId("layer"), layers, state.layer);
  byId("view").value = state.view;
  byId("layer").disabled = state.view === "grid";
  byId("heads").hidden = state.view === "grid";
  makeHeadButtons();
  drawPicture();
}

function update(changes) {
  Object.assign(state, changes);
  if (state.view === "heads" && byId("picture").querySelector(".columns")) {
    select();
  }
  markRow();
}

byId("kind").addEventListener("change", (event) => {
  Object.assign(state, { kind: event.target.value, pinned: null });
  // The encoder and the decoder can have different numbers of layers.
  state.layer = Math.min(state.layer, current().numLayers - 1);
  draw();
});
byId("layer").addEventListener("change", (event) => {
  state.layer = Number(event.target.value);
  drawPicture();
});
byId("view").addEventListener("change", (event) => {
  state.view = event.target.value;
  draw();
});

const picture = byId("picture");
picture.addEventListener("pointerover", (event) => {
  const token = tokenOf(event.target);
  if (!isSame(token, state.hovered)) {
    update({ hovered: token });
  }
  showCell(event.target);
});
picture.addEventListener("pointerleave", () => update({ hovered: null }));
picture.addEventListener("focusin", (event) => {
  if (event.target.matches(":focus-visible")) {
    update({ focused: tokenOf(event.target) });
  }
});
picture.addEventListener("focusout", () => update({ focused: null }));
picture.addEventListener("click", (event) => {
  const token = tokenOf(event.target);
  if (token) {
    update({ pinned: isSame(token, state.pinned) ? null : token });
  }
});
picture.addEventListener("keydown", moveFocus);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    update({ pinned: null, hovered: null, focused: null });
  }
});

/** Move the focus between tokens with the arrow keys, Home, and End. */
function moveFocus(event) {
  const token = tokenOf(event.target);
  const columns = { ArrowLeft: "queries", ArrowRight: "keys" };
  const side = columns[event.key] ?? token?.side;
  if (!token) {
    return;
  }
  const last = current()[side].length - 1;
  const positions = {
    ArrowUp: token.position - 1,
    ArrowDown: token.position + 1,
    ArrowLeft: token.position,
    ArrowRight: token.position,
    Home: 0,
    End: last,
  };
  if (event.key in positions) {
    event.preventDefault();
    const position = Math.min(Math.max(positions[event.key], 0), last);
    const column = document.querySelector(`.column.${side}`);
    [...column.children].forEach((child, i) => (child.tabIndex = i === position ? 0 : -1));
    column.children[position].focus();
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  document.querySelectorAll(".grid canvas").forEach(paint);
});
byId("source").textContent = data.source;
byId("target").textContent = data.target;
draw();
