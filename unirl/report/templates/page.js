"use strict";
// Read-outs: the nearest point under the pointer, of every line that has one there.
for (const field of document.querySelectorAll(".field")) {
  const source = field.querySelector("script");
  if (!source) continue;
  const lines = JSON.parse(source.textContent);
  const cursor = field.querySelector(".cursor");
  const readOut = field.querySelector(".read-out");

  const nearest = (xs, at) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < at) low = middle + 1; else high = middle;
    }
    return low > 0 && at - xs[low - 1] < xs[low] - at ? low - 1 : low;
  };

  const row = (line, place) => {
    const item = document.createElement("span");
    const key = document.createElement("b");
    key.className = "key c" + line.colour;
    item.append(key);
    if (lines.length > 1) item.append(line.label + " ");
    const value = document.createElement("strong");
    value.textContent = line.values[place];
    item.append(value);
    return item;
  };

  const hide = () => { cursor.hidden = readOut.hidden = true; };
  const show = (event) => {
    const box = field.getBoundingClientRect();
    const at = 1000 * (event.clientX - box.left) / box.width;
    const near = lines.filter((line) => line.xs.length)
      .map((line) => ({ line, place: nearest(line.xs, at) }));
    if (!near.length) return hide();
    const distance = ({ line, place }) => Math.abs(line.xs[place] - at);
    const best = near.reduce((one, other) => (distance(other) < distance(one) ? other : one));
    const x = best.line.xs[best.place];
    const reach = 1000 * 8 / box.width;
    const title = document.createElement("span");
    title.textContent = best.line.at[best.place];
    readOut.replaceChildren(title, ...near
      .filter(({ line, place }) => Math.abs(line.xs[place] - x) <= reach)
      .map(({ line, place }) => row(line, place)));
    cursor.hidden = readOut.hidden = false;
    cursor.style.left = x / 10 + "%";
    const left = x / 1000 * box.width;
    const width = readOut.offsetWidth;
    const beside = left + width + 14 > box.width ? left - width - 10 : left + 10;
    readOut.style.left = Math.max(Math.min(0, box.width - width), beside) + "px";
  };
  field.addEventListener("pointermove", show);
  field.addEventListener("pointerdown", show);
  field.addEventListener("pointerleave", hide);
}
