"use strict";
// What of the page is shown, and the value under the pointer. Without a script, the page is whole.

const every = (selector, within = document) => [...within.querySelectorAll(selector)];

// ---- filters: a scenario's section, a method's rows and curves

const KEPT = "perennial-filters";  // while the tab is open, also when the page is renewed
const wanted = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");

function shown(element) {
  return ["scenario", "method"].every(
    (name) => !wanted[name] || !(name in element.dataset) || element.dataset[name].toLowerCase().includes(wanted[name]));
}

function filter() {
  for (const element of every("[data-scenario], [data-method]")) element.toggleAttribute("data-hidden", !shown(element));
  for (const section of every("section[data-scenario]")) {
    const first = section.querySelector("tbody");
    if (first && !first.querySelector("tr:not([data-hidden])")) section.toggleAttribute("data-hidden", true);
  }
  for (const link of every("nav a[data-scenario]")) {
    const section = document.querySelector(link.getAttribute("href"));
    link.toggleAttribute("data-hidden", section.hasAttribute("data-hidden"));
  }
  for (const svg of every("svg[data-figure]"))
    for (const item of every(".legend li", svg.closest("section")))
      for (const part of every(`[id$="-curve-${item.dataset.style}"], [id$="-band-${item.dataset.style}"]`, svg))
        part.toggleAttribute("data-hidden", item.hasAttribute("data-hidden"));
}

for (const form of every(".filters")) {
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const input of every("input", form)) {
    input.value = wanted[input.dataset.filter] ?? "";
    input.addEventListener("input", () => {
      wanted[input.dataset.filter] = input.value.trim().toLowerCase();
      sessionStorage.setItem(KEPT, JSON.stringify(wanted));
      filter();
    });
  }
}
filter();

// ---- values under the pointer

function nearest(svg, facts, event) {
  const frame = svg.getBoundingClientRect(), view = svg.viewBox.baseVal, [left, top, right, bottom] = facts.box;
  const scale = frame.width / view.width;
  const at = (value, [low, high]) => (value - low) / (high - low);
  let best = null;
  for (const line of facts.lines) {
    const item = svg.closest("section").querySelector(`.legend li[data-style="${line.style}"]`);
    if (!item || item.hasAttribute("data-hidden")) continue;
    for (let i = 0; i < (line.x || []).length; i++) {
      const x = scale * (left + at(line.x[i], facts.x) * (right - left));
      const y = scale * (bottom - at(facts.log ? Math.log10(line.y[i]) : line.y[i], facts.y) * (bottom - top));
      const far = Math.hypot(x - (event.clientX - frame.left), y - (event.clientY - frame.top));
      if (!best || far < best.far) best = { far, x, y, line, i, name: item.querySelector("span").textContent };
    }
  }
  return best && best.far < 40 ? best : null;
}

for (const svg of every("svg[data-figure]")) {
  const facts = JSON.parse(svg.dataset.figure), place = svg.parentElement;
  const told = document.createElement("div"), spot = document.createElement("div");
  told.className = "told";
  spot.className = "spot";
  const away = () => { told.remove(); spot.remove(); };
  place.addEventListener("pointermove", (event) => {
    const found = nearest(svg, facts, event);
    if (!found) return away();
    const { line, i } = found, spread = (line.spread || [])[i];
    told.textContent = `${found.name}: ${facts.names[line.x[i]] ?? line.x[i]}, ${line.y[i]}${spread ? ` ± ${spread}` : ""}`;
    place.append(told, spot);
    spot.style.left = `${found.x}px`;
    spot.style.top = `${found.y}px`;
    told.style.left = `${Math.max(0, Math.min(found.x + 8, place.clientWidth - told.offsetWidth))}px`;
    told.style.top = `${found.y > 34 ? found.y - 30 : found.y + 12}px`;
  });
  place.addEventListener("pointerleave", away);
}

// ---- a figure over the whole width, and as a file

function standalone(svg) {
  const copy = svg.cloneNode(true), style = getComputedStyle(svg);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  for (const part of every("[data-hidden]", copy)) part.remove();
  delete copy.dataset.figure;
  const { x, y, width, height } = svg.viewBox.baseVal;
  const curves = every(".legend li", svg.closest("section")).filter((item) => !item.hasAttribute("data-hidden"));
  curves.forEach((item, place) => {
    const text = document.createElementNS(svg.namespaceURI, "text");
    text.setAttribute("x", x + 8);
    text.setAttribute("y", y + height + 12 + 14 * place);
    text.setAttribute("style", `fill: var(--s${item.dataset.style}); font-size: 11px`);
    text.textContent = `\u2501 ${item.querySelector("span").textContent}`;
    copy.append(text);
  });
  copy.setAttribute("viewBox", `${x} ${y} ${width} ${height + 14 * curves.length + 6}`);
  const names = new Set(copy.outerHTML.match(/--[a-z0-9-]+/g));
  copy.style.cssText = [...names].map((name) => `${name}:${style.getPropertyValue(name)}`).join(";");
  copy.style.color = style.color;
  copy.style.background = getComputedStyle(document.body).backgroundColor;
  copy.style.fontFamily = "sans-serif";
  return copy.outerHTML;
}

for (const svg of every("svg[data-figure]")) {
  const figure = svg.closest("figure"), caption = figure.querySelector("figcaption");
  const button = (text, action) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.addEventListener("click", () => action(made));
    caption.append(" ", made);
  };
  button("larger", (made) => { made.textContent = figure.classList.toggle("large") ? "smaller" : "larger"; });
  button("save", () => {
    const link = document.createElement("a");
    link.download = `${caption.firstChild.textContent.trim().replace(/[^\w=.]+/g, "-")}.svg`;
    link.href = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
    link.click();
  });
}
