"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = () => window.innerWidth < 700;

  // A column's button sorts the rows by it; missing values stay at the end.
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    for (const button of table.querySelectorAll("thead button")) {
      button.addEventListener("click", () => {
        const head = button.closest("th"), index = Number(button.dataset.column);
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => {
          const cell = row.cells[index], raw = cell.dataset.sort;
          return raw === undefined ? (cell.classList.contains("missing") ? null : cell.textContent) : Number(raw);
        };
        const rows = [...body.rows].map((row) => [key(row), row]);
        rows.sort(([a], [b]) => {
          if (a === null || b === null) return (a === null) - (b === null);
          const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
          return down ? -order : order;
        });
        body.append(...rows.map(([, row]) => row));
      });
    }
  }

  // Where a table or a picture goes on to the left or right, and how wide its data sets are, once it is near what is read.
  const measureWidth = (wide) => {
    const box = wide.firstElementChild, first = box.querySelector("thead tr:last-child .name");
    wide.style.setProperty("--lead", narrow() || !first ? "0px" : `${first.offsetWidth}px`);
    const mark = () => {
      wide.classList.toggle("left", box.scrollLeft > 1);
      wide.classList.toggle("right", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    };
    box.onscroll = mark;
    mark();
  };
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => measureWidth(target)));
  const approaching = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      approaching.unobserve(target);
      sizes.observe(target);
    }
  }, { rootMargin: "400px" });
  for (const wide of document.querySelectorAll(".wide")) approaching.observe(wide);

  // Plotly takes longer to load than the rest of the page: only once a chart is near what is read.
  const library = document.getElementById("plotly").textContent;
  if (!library) return;
  const load = () => {
    if (typeof Plotly !== "undefined") return;
    const script = document.createElement("script");
    script.textContent = library;
    document.head.append(script);
  };
  const data = JSON.parse(document.getElementById("data").textContent);

  // Plotly reads tags and entities in texts; names have none.
  const plain = (name) => name.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const ink = () => getComputedStyle(document.body).color;
  const line = () => getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
  const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };
  const tone = (entry) => (dark.matches ? entry.dark : entry.colour);
  const faint = (colour, opacity) => {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${opacity})`;
  };

  const traces = (chart, measure, axis) => {
    const result = [], { length } = unit(chart, measure, axis);
    chart.series.forEach((entry) => {
      const group = data.groups[entry.group], curve = group.curves[measure];
      if (!curve) return;
      const along = group.axes[curve.at], limit = chart.rounds || Infinity;
      const pick = (values) => values.filter((_, i) => along.round[i] <= limit);
      const x = pick(along[axis]).map((value) => (value === null ? null : value / length)), y = pick(curve.mean), std = curve.std && pick(curve.std);
      const shared = { x, legendgroup: entry.name, hoverinfo: "skip", showlegend: false, mode: "lines", line: { width: 0 } };
      if (std) {
        result.push({ ...shared, y: y.map((v, i) => v + (std[i] || 0)) });
        result.push({ ...shared, y: y.map((v, i) => v - (std[i] || 0)), fill: "tonexty", fillcolor: faint(tone(entry), 0.16) });
      }
      result.push({
        x, y, name: plain(entry.name), legendgroup: entry.name, mode: "lines+markers",
        line: { color: tone(entry), width: 1.8, dash: entry.dash },
        marker: { color: tone(entry), symbol: entry.marker, size: 7, maxdisplayed: 8 },
        customdata: pick(along.round).map((t, i) => [t, std && std[i]]),
        hovertemplate: `<b>%{fullData.name}</b><br>round %{customdata[0]}: %{y:.4~g}${std ? " ± %{customdata[1]:.2~g}" : ""}<extra></extra>`,
      });
    });
    for (const mark of (measure === "test_acc" && axis === "round" && chart.marks) || []) {
      result.push({
        x: mark.x, y: mark.y, name: `${plain(mark.name)} in the paper`, legendgroup: mark.name, mode: "markers", showlegend: false,
        marker: { symbol: "x-thin", size: 8, line: { color: tone(mark), width: 2 } },
        hovertemplate: `<b>%{fullData.name}</b><br>round %{x}: %{y} %<extra></extra>`,
      });
    }
    return result;
  };

  // On a phone the legend is a list below the chart, whose names are broken as any text.
  const MARKS = {
    circle: "0,-4 2.8,-2.8 4,0 2.8,2.8 0,4 -2.8,2.8 -4,0 -2.8,-2.8", square: "-4,-4 4,-4 4,4 -4,4", diamond: "0,-5 5,0 0,5 -5,0",
    "triangle-up": "0,-5 5,4 -5,4", "triangle-down": "0,5 5,-4 -5,-4", pentagon: "0,-5 5,-1.5 3,4.5 -3,4.5 -5,-1.5",
    cross: "-2,-5 2,-5 2,-2 5,-2 5,2 2,2 2,5 -2,5 -2,2 -5,2 -5,-2 -2,-2", star: "0,-6 1.5,-2 6,-2 2.4,1 3.7,5 0,2.6 -3.7,5 -2.4,1 -6,-2 -1.5,-2",
  };
  const lists = new Map();  // by the element of a chart
  const phone = (target, shape, entries) => {
    lists.get(target)?.remove();
    if (!narrow()) return shape;
    const list = document.createElement("ul");
    list.className = "legend";
    for (const entry of entries) {
      const item = document.createElement("li"), name = document.createElement("span");
      item.innerHTML = `<svg viewBox="-20 -7 40 14" width="40" height="14" aria-hidden="true"><line x1="-19" x2="19" stroke="${tone(entry)}"
        stroke-width="2" stroke-dasharray="${entry.dash === "solid" ? "" : entry.dash}"/><polygon fill="${tone(entry)}" points="${MARKS[entry.marker]}"/></svg>`;
      name.textContent = entry.name;
      item.append(name);
      list.append(item);
    }
    target.after(list);
    lists.set(target, list);
    return { ...shape, showlegend: false };
  };

  // Shares end at 0 and 100 %, also when the axes are moved.
  const limits = (chart, measure, log) => {
    if (!(chart?.percent || data.percent).includes(measure)) return {};
    const most = log ? { maxallowed: 2 } : { minallowed: 0, maxallowed: 100 };  // as powers of ten on a logarithmic axis
    return { ...most, autorangeoptions: log ? { clipmax: 100 } : { clipmin: 0, clipmax: 100 } };
  };
  const layout = (title, x, y, log, legend, measure, chart) => ({
    title: title ? { text: title, font: { size: 14 }, x: 0.02, xanchor: "left" } : undefined,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink(), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 56, r: 12, t: title ? 36 : 28, b: 46 },
    xaxis: { title: { text: x }, gridcolor: line(), zeroline: false, rangemode: "tozero" },
    yaxis: { title: { text: y }, gridcolor: line(), zeroline: false, type: log ? "log" : "linear", ...limits(chart, measure, log) },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: faint("#808890", 0.6), activecolor: ink() },
    hovermode: "closest", showlegend: legend,
    legend: { y: 1, x: 1.01 },
  });

  // An axis has the unit that suits its longest curve.
  const units = {
    bytes: [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]],
    seconds: [["hours", 7200, 3600], ["minutes", 120, 60], ["seconds", 0, 1]],
  };
  const names = { round: "Round", units: "Communication: vectors of the model per participant (Nd)", bytes: "Communication, down and up", seconds: "Time" };
  const unit = (chart, measure, axis) => {
    if (!units[axis]) return { length: 1, title: names[axis] };
    let most = 0;
    for (const entry of chart.series) {
      const group = data.groups[entry.group], curve = group.curves[measure];
      if (curve) for (const value of group.axes[curve.at][axis]) most = Math.max(most, value || 0);
    }
    const [name, least, length = least] = units[axis].find((each) => most >= each[1]) || units[axis].at(-1);
    return { length, title: `${names[axis]} (${name})` };
  };
  const shown = (chart, measure) => chart.series.filter((entry) => data.groups[entry.group].curves[measure]);
  const draws = new Map();  // by the element of a chart

  for (const holder of document.querySelectorAll("[data-curves]")) {
    const chart = data.charts[holder.dataset.curves];
    const [measure, axis] = holder.querySelectorAll("select"), log = holder.querySelector("input");
    const target = holder.querySelector(".chart");
    target.setAttribute("aria-label", `${holder.getAttribute("aria-label")}; the numbers are in the tables below`);
    const draw = () => Plotly.react(
      target, traces(chart, measure.value, axis.value),
      phone(target, layout("", unit(chart, measure.value, axis.value).title, plain((chart.measures || data.measures)[measure.value]), log.checked, true, measure.value, chart), shown(chart, measure.value)), config);
    measure.addEventListener("change", () => { log.checked = measure.value === "consistency"; draw(); });
    axis.addEventListener("change", draw);
    log.addEventListener("change", draw);
    draws.set(target, draw);
  }

  for (const target of document.querySelectorAll("[data-panel]")) {
    const [name, index] = target.dataset.panel.split(":"), chart = data.panels[name][Number(index)];
    target.setAttribute("aria-label", chart.title);
    draws.set(target, () => {
      const shape = layout(chart.title, "Round", data.measures[chart.measure], chart.measure === "consistency", true, chart.measure);
      shape.legend = { orientation: "h", y: -0.28, font: { size: 11 } };
      if (chart.shortest) shape.xaxis.range = [0, chart.shortest];
      Plotly.react(target, traces(chart, chart.measure, "round"), phone(target, shape, shown(chart, chart.measure)), config);
    });
  }

  for (const target of document.querySelectorAll("[data-phases]")) {
    const bars = data.phases[target.dataset.phases];
    bars.names = bars.names.map(plain);
    target.setAttribute("aria-label", "Seconds per round by phase; the numbers are in the table above");
    draws.set(target, () => {
      const shape = layout("", `Seconds per round${narrow() ? "" : " (slowest rank of each phase)"}`, "", false, true);
      const labels = bars.names.map((name) => (narrow() ? name.replace(/(.{16,}?) /g, "$1<br>") : name));
      const lines = Math.max(1, ...labels.map((label) => label.split("<br>").length));
      shape.barmode = "stack";
      shape.yaxis = { autorange: "reversed", automargin: true, tickvals: bars.names, ticktext: labels };
      shape.legend = { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" };
      shape.margin.t = narrow() ? 90 : 36;
      shape.height = 94 + shape.margin.t + (12 + 14 * lines) * bars.names.length;
      Plotly.react(target, bars.phases.map((phase) => ({
        type: "bar", orientation: "h", name: phase.name, y: bars.names, x: phase.seconds, marker: { color: phase.colour },
        hovertemplate: `%{y}<br>${phase.name}: %{x:.3~g} s<extra></extra>`,
      })), shape, config);
    });
  }

  for (const target of document.querySelectorAll("[data-map]")) {
    const map = data.maps[target.dataset.map], { means, shown, range } = map;
    target.setAttribute("aria-label", `${map.title}; the numbers are in the table above`);
    draws.set(target, () => {
      const shape = layout("", plain(map.x.title), plain(map.y.title), false, false), inks = map.ink[dark.matches ? "dark" : "light"];
      // Numbers on the axes are positions, as settings are rarely evenly spaced.
      const axis = ({ ticks }) => ({ tickvals: ticks.map((_, i) => i), ticktext: ticks.map(plain), showgrid: false, fixedrange: true, automargin: true });
      shape.xaxis = { ...shape.xaxis, ...axis(map.x), rangemode: "normal" };
      shape.yaxis = { ...shape.yaxis, ...axis(map.y), autorange: "reversed" };
      const most = (map.smaller ? Math.min : Math.max)(...means.flat().filter((each) => each !== null));
      const short = (mean, y, x) => (map.short ? map.short[y][x] : mean.toFixed(1));
      const text = (mean, y, x) => (mean === null ? "–" : mean === most ? `<b>${short(mean, y, x)}</b>` : short(mean, y, x));
      shape.annotations = means.flatMap((row, y) => row.map((mean, x) => ({
        x, y, text: text(mean, y, x), showarrow: false, font: { color: mean === null ? ink() : inks[y][x], size: map.x.ticks.length > (narrow() ? 6 : 14) ? 9 : 12 },
      })));
      shape.height = 130 + 40 * map.y.ticks.length;
      shape.width = Math.min(target.parentElement.clientWidth, 240 + 90 * map.x.ticks.length);
      const colours = dark.matches ? [...map.colours].reverse() : map.colours;
      Plotly.react(target, [{
        type: "heatmap", z: means, zmin: range[0], zmax: range[1], xgap: 2, ygap: 2, hoverongaps: false,
        colorscale: colours.map((colour, i) => [i / (colours.length - 1), colour]), showscale: !narrow(),
        colorbar: { title: { text: plain(map.value), side: "right" }, thickness: 14, outlinewidth: 0 },
        text: means.map((row, y) => row.map((_, x) => `${plain(map.y.title)} ${plain(map.y.ticks[y])}<br>${plain(map.x.title)} ${plain(map.x.ticks[x])}<br><b>${shown[y][x]}${map.unit ?? " %"}</b>`)),
        hovertemplate: "%{text}<extra></extra>",
      }], shape, config);
    });
  }

  const drawn = new Set();
  const draw = (target) => {
    load();
    drawn.add(target);
    draws.get(target)();
    document.body.dataset.drawn = String(drawn.size);
  };
  const nearby = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      nearby.unobserve(target);
      setTimeout(draw, 0, target);  // one at a time, so that the page can be scrolled meanwhile
    }
  }, { rootMargin: "400px" });
  for (const target of draws.keys()) {
    target.setAttribute("role", "img");
    nearby.observe(target);
  }
  dark.addEventListener("change", () => drawn.forEach(draw));
  window.addEventListener("beforeprint", () => draws.forEach((_, target) => drawn.has(target) || draw(target)));
})();
