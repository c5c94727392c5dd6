// The heads view: the sentence twice, joined by lines whose opacity is the weight.

function drawHeads() {
  const { queries, keys, queryLabel, keyLabel } = current();
  const rows = Math.max(queries.length, keys.length);
  const lines = make("svg", {
    class: "lines",
    viewBox: `0 0 1 ${rows}`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  lines.style.height = `calc(${rows} * var(--row))`;
  const columns = make(
    "div",
    { class: "columns" },
    make("h3", {}, queryLabel),
    make("h3", {}, keyLabel),
    makeColumn("queries", queries),
    lines,
    makeColumn("keys", keys),
  );
  // The strips keep their width while they are empty, so that no token moves.
  columns.style.setProperty("--num-heads", Math.max(1, state.heads.size));
  byId("picture").replaceChildren(columns);
  select();
}

function makeColumn(side, tokens) {
  const label = side === "queries" ? current().queryLabel : current().keyLabel;
  const buttons = tokens.map((token, position) =>
    make(
      "button",
      {
        type: "button",
        class: "token",
        title: token,
        "data-side": side,
        "data-position": position,
        tabindex: position === 0 ? 0 : -1,
      },
      make("span", { class: "strip" }),
      make("bdi", {}, token),
    ),
  );
  return make("div", { class: `column ${side}`, role: "group", "aria-label": label }, ...buttons);
}

/** Show the lines and weights of the selected token, or of all tokens if none is selected. */
function select() {
  const chosen = selected();
  const { queries, keys } = current();
  const lines = [];
  const range = (side, tokens) =>
    chosen?.side === side ? [chosen.position] : tokens.map((_, position) => position);
  activeHeads().forEach((head, number, heads) => {
    const shift = ((number + 0.5) / heads.length - 0.5) * 0.4;
    for (const query of range("queries", queries)) {
      for (const key of range("keys", keys)) {
        const opacity = weight(state.layer, head, query, key);
        if (opacity > 0) {
          lines.push(
            colored("line", head, {
              x1: 0,
              y1: query + 0.5 + shift,
              x2: 1,
              y2: key + 0.5 + shift,
              "stroke-opacity": opacity.toFixed(4),
              "data-head": head,
              "data-query": query,
              "data-key": key,
            }),
          );
        }
      }
    }
  });
  document.querySelector(".lines").replaceChildren(...lines);
  document.querySelectorAll(".token").forEach((token) => markToken(token, chosen));
  byId("readout").replaceChildren(...(chosen ? [describe(chosen)] : []));
}

function tokenOf(element) {
  const token = element.closest?.(".token");
  return token && { side: token.dataset.side, position: Number(token.dataset.position) };
}

function isSame(one, other) {
  return one?.side === other?.side && one?.position === other?.position;
}

function markToken(element, chosen) {
  const token = tokenOf(element);
  element.classList.toggle("selected", isSame(token, chosen));
  element.setAttribute("aria-pressed", isSame(token, state.pinned));
  const strip = element.querySelector(".strip");
  const isTarget = chosen !== null && token.side !== chosen.side;
  strip.replaceChildren(
    ...(isTarget ? activeHeads() : []).map((head) => {
      const cell = colored("i", head, { "data-head": head });
      cell.style.opacity = weightBetween(chosen, token, head).toFixed(4);
      return cell;
    }),
  );
}

function weightBetween(one, other, head) {
  const [query, key] = one.side === "queries" ? [one, other] : [other, one];
  return weight(state.layer, head, query.position, key.position);
}

/** Return a list with, for each head, the tokens with the most weight in the other column. */
function describe(chosen) {
  const otherSide = chosen.side === "queries" ? "keys" : "queries";
  const others = current()[otherSide];
  const items = activeHeads().map((head) => {
    const weights = others.map((_, position) =>
      weightBetween(chosen, { side: otherSide, position }, head),
    );
    const best = weights.map((_, position) => position).sort((a, b) => weights[b] - weights[a]);
    const parts = best
      .slice(0, 3)
      .filter((position) => weights[position] > 0)
      .flatMap((position, rank) => {
        const number = weights[position].toFixed(2);
        return [rank ? ", " : "", make("bdi", {}, others[position]), ` ${number}`];
      });
    return make("li", {}, colored("span", head, { class: "swatch" }), ` head ${head + 1}: `, ...parts);
  });
  const verb = chosen.side === "queries" ? " attends to" : " is attended to by";
  const token = make("bdi", {}, current()[chosen.side][chosen.position]);
  return make("div", {}, make("strong", {}, token, verb), make("ul", {}, ...items));
}
