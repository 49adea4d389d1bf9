"use strict";
// Shows values under the pointer, or where the arrow keys are.  Without it the page has all its charts and tables.
(() => {
  const tip = document.getElementById("tip");
  const write = (value, unit) => {
    if (value === null || value === undefined) return "no number";
    if (unit === "2^") return Math.pow(2, value).toLocaleString("en-US");
    const size = Math.abs(value);
    const text = size !== 0 && (size < 1e-3 || size >= 1e9) ? value.toExponential(3)
      : value.toLocaleString("en-US", {maximumSignificantDigits: 5});
    return unit ? `${text} ${unit}` : text;
  };
  const time = (seconds) => {
    if (seconds < 1) return `${(1000 * seconds).toPrecision(3)} ms`;
    if (seconds < 60) return `${seconds.toPrecision(3)} s`;
    const all = Math.round(seconds), h = Math.floor(all / 3600), m = Math.floor(all / 60) % 60, s = all % 60;
    return h ? `${h.toLocaleString("en-US")} h ${String(m).padStart(2, "0")} min` : `${m} min ${String(s).padStart(2, "0")} s`;
  };
  const element = (name, text) => {
    const made = document.createElement(name);
    made.textContent = text;
    return made;
  };
  const put = (x, y) => {
    tip.hidden = false;
    const width = tip.offsetWidth, height = tip.offsetHeight;
    const left = x + 16 + width > innerWidth - 8 ? x - 16 - width : x + 16;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(y - height / 2, innerHeight - height - 8))}px`;
  };
  const hide = () => { tip.hidden = true; };

  const nearest = (values, wanted) => {
    let low = 0, high = values.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle; else high = middle;
    }
    return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
  };

  const curves = (plot, svg, data) => {
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("y1", 0);
    cursor.setAttribute("y2", svg.getBoundingClientRect().height - data.foot);
    const longest = data.series.reduce((one, other) => (other.x.length > one.x.length ? other : one));
    let place = 0;
    const show = (at, y) => {
      place = at;
      const where = longest.x[place], box = svg.getBoundingClientRect();
      const share = Math.max(0, Math.min(1, (where - data.low) / (data.high - data.low)));
      cursor.setAttribute("x1", `${100 * share}%`);
      cursor.setAttribute("x2", `${100 * share}%`);
      svg.append(cursor);
      const table = document.createElement("table");
      for (const one of data.series) {
        const row = table.insertRow(), near = nearest(one.x, where);
        row.append(element("td", one.name), element("td", write(one.y[near], data.unit)));
      }
      tip.replaceChildren(element("b", data.time ? time(where) : `${data.along} ${write(where)}`), table);
      put(box.left + share * box.width, y === undefined ? box.top + box.height / 2 : y);
    };
    return {
      move: (event) => {
        const box = svg.getBoundingClientRect();
        const share = (event.clientX - box.left) / box.width;
        show(nearest(longest.x, data.low + share * (data.high - data.low)), event.clientY);
      },
      step: (by) => show(Math.max(0, Math.min(longest.x.length - 1, place + by * Math.max(1, Math.round(longest.x.length / 60))))),
      end: (last) => show(last ? longest.x.length - 1 : 0),
      leave: () => { cursor.remove(); hide(); },
    };
  };

  const marks = (plot, svg) => {
    const all = [...svg.querySelectorAll("[data-tip]")];
    let place = -1;
    const show = (mark, x, y) => {
      for (const one of all) one.classList.toggle("chosen", one === mark);
      if (!mark) { hide(); return; }
      const box = mark.getBoundingClientRect();
      tip.replaceChildren(document.createTextNode(mark.dataset.tip));
      put(x === undefined ? box.left + box.width / 2 : x, y === undefined ? box.top + box.height / 2 : y);
    };
    return {
      move: (event) => {
        let found = -1;
        all.forEach((mark, number) => {
          const box = mark.getBoundingClientRect();
          const slack = Math.max(0, 3 - box.width / 2);
          if (event.clientX >= box.left - slack && event.clientX <= box.right + slack
              && event.clientY >= box.top - 2 && event.clientY <= box.bottom + 2) found = number;
        });
        if (found >= 0) place = found;
        show(found >= 0 ? all[found] : null, event.clientX, event.clientY);
      },
      step: (by) => { if (all.length) { place = Math.max(0, Math.min(all.length - 1, place + by)); show(all[place]); } },
      end: (last) => { if (all.length) { place = last ? all.length - 1 : 0; show(all[place]); } },
      leave: () => show(null),
    };
  };

  // A key that moves the focus scrolls the page, and the browser then reports the resting pointer again, over another plot.
  // Such an event must not hide the values that the key shows.
  let keys = false, pointer = "";
  for (const plot of document.querySelectorAll(".plot")) {
    const svg = plot.querySelector("svg"), data = plot.querySelector("script");
    const hover = data ? curves(plot, svg, JSON.parse(data.textContent)) : marks(plot, svg);
    const ifMoved = (act) => (event) => {
      const position = `${event.screenX} ${event.screenY}`;
      if (keys && position === pointer) return;
      keys = false;
      pointer = position;
      act(event);
    };
    plot.addEventListener("pointermove", ifMoved(hover.move));
    plot.addEventListener("pointerdown", hover.move);
    plot.addEventListener("pointerleave", ifMoved(hover.leave));
    plot.addEventListener("blur", hover.leave);
    plot.addEventListener("keydown", (event) => {
      const act = {
        ArrowRight: () => hover.step(1), ArrowDown: () => hover.step(1),
        ArrowLeft: () => hover.step(-1), ArrowUp: () => hover.step(-1),
        Home: () => hover.end(false), End: () => hover.end(true), Escape: hover.leave,
      }[event.key];
      if (act) { keys = true; act(); event.preventDefault(); }
    });
  }
})();
