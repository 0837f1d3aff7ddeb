"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const run = data.runs[0];
  const byId = (id) => document.getElementById(id);
  const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#ec4899", "#84cc16"];
  const root = document.documentElement;

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== undefined) made.setAttribute(name, value);
    }
    for (const child of children) made.append(child);
    return made;
  }

  // -- head, findings, tables -------------------------------------------------------------------------------------

  function drawHead() {
    byId("name").textContent = data.runs.map((r) => r.name).join(" and ");
    byId("directory").textContent = run.directory;
    for (const [what, value] of run.summary) {
      byId("summary").append(element("div", {}, element("span", {}, what), element("b", {}, value)));
    }
  }

  function drawFindings() {
    const list = byId("finding-list");
    byId("helps-most").textContent = run.helps_most;
    if (!run.findings.length) list.append(element("p", { class: "hint" }, "Nothing ails this run."));
    for (const found of run.findings) {
      const links = found.metrics.map((key) => {
        const link = element("a", { href: "#charts" }, key);
        link.addEventListener("click", () => mark(key));
        return link;
      });
      const kind = found.severity === "hint" ? "hint-found" : found.severity;
      list.append(element("div", { class: "finding " + kind, "data-title": found.title },
        element("h3", {}, found.title), element("p", {}, found.evidence), element("p", {}, element("b", {}, "What helps: "), found.remedy),
        element("p", {}, ...links)));
    }
  }

  function mark(key) {
    for (const chart of document.querySelectorAll(".chart")) {
      chart.classList.toggle("marked", chart.dataset.keys.split(" ").includes(key));
    }
    const first = document.querySelector(".chart.marked");
    if (first) setTimeout(() => first.scrollIntoView({ block: "center" }), 0);
  }

  function row(cells, tag) {
    return element("tr", {}, ...cells.map((cell) => element(tag || "td", {}, String(cell))));
  }

  function drawTables() {
    byId("faults").textContent = run.faults.length ? "Evidence in faults/: " + run.faults.join(", ") : "No fault was recorded.";
    byId("event-table").append(row(["time, s", "event", "what"], "th"), ...run.events.map((e) => row(e)));
    const settings = byId("setting-table");
    const rows = Object.entries(run.settings).map((entry) => row(entry));
    settings.append(...rows);
    byId("key-search").addEventListener("input", (event) => {
      const wanted = event.target.value.toLowerCase();
      for (const one of rows) one.hidden = !one.textContent.toLowerCase().includes(wanted);
    });
    if (data.runs.length > 1) {
      byId("comparison").hidden = false;
      const shown = data.runs[0].summary.map(([what], i) => [what, ...data.runs.map((r) => r.summary[i][1])]);
      byId("differences").append(row(["", ...data.runs.map((r) => r.name)], "th"), ...shown.map((r) => row(r)),
        row(["setting", ...data.runs.map(() => "")], "th"), ...data.differences.map((r) => row(r)));
    }
  }

  // -- charts -----------------------------------------------------------------------------------------------------

  let plots = [];
  const axisColours = () => {
    const style = getComputedStyle(root);
    return { text: style.getPropertyValue("--soft").trim(), line: style.getPropertyValue("--line").trim() };
  };

  function columnsOf(chart) {
    // x and the named series of all runs; several runs share one x
    if (data.runs.length === 1 || chart.kind === "stack") {
      const series = chart.keys.filter((key) => run.metrics[key]).map((key) => ({ name: key, values: run.metrics[key] }));
      return { x: run.steps, series };
    }
    const x = [...new Set(data.runs.flatMap((r) => r.steps))].sort((a, b) => a - b);
    const series = [];
    for (const key of chart.keys.slice(0, 2)) {
      for (const one of data.runs) {
        if (!one.metrics[key]) continue;
        const at = new Map(one.steps.map((step, i) => [step, one.metrics[key][i]]));
        series.push({ name: one.name + " " + key, values: x.map((step) => at.get(step) ?? null) });
      }
    }
    return { x, series };
  }

  function stacked(series) {
    const sums = [];
    return series.map(({ name, values }) => {
      const before = sums.length ? sums[sums.length - 1] : values.map(() => 0);
      const sum = values.map((value, i) => (before[i] || 0) + (value || 0));
      sums.push(sum);
      return { name, values: sum, own: values };
    });
  }

  function drawChart(chart, box) {
    const { x, series } = columnsOf(chart);
    if (!series.length || !x.length) return null;
    const piles = chart.kind !== "lines";
    let shown = piles ? stacked(series) : series;
    const colours = shown.map((_, i) => COLOURS[i % COLOURS.length]);
    const order = shown.map((_, i) => i);
    if (piles) order.reverse(); // the highest pile is drawn first, the others over it
    const axes = axisColours();
    const axis = { stroke: axes.text, grid: { stroke: axes.line, width: 1 }, ticks: { stroke: axes.line } };
    const sparse = (values) => values.filter((v) => v !== null).length < values.length / 2;
    const options = {
      width: Math.max(260, box.clientWidth - 24), height: 220,
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: piles ? { range: (_, __, max) => [0, max || 1] } : {} },
      axes: [axis, { ...axis, size: 58 }],
      series: [{ label: "step" }, ...order.map((i) => ({
        label: shown[i].name, stroke: colours[i], width: piles ? 0 : 1.5, spanGaps: true,
        fill: piles ? colours[i] : undefined,
        points: { show: !piles && (sparse(shown[i].values) || x.length < 3) },
        value: (_, value, __, at) => {
          const own = piles && at !== null ? shown[i].own[at] : value;
          return own === null || own === undefined ? "-" : Number(own.toPrecision(4)).toString();
        },
      }))],
      hooks: { setSelect: [(plot) => zoomAll(plot)] },
    };
    const plot = new uPlot(options, [x, ...order.map((i) => shown[i].values)], box);
    plot.over.addEventListener("dblclick", () => showAll());
    return plot;
  }

  let zooming = false;
  function zoomAll(plot) {
    if (zooming || plot.select.width < 3) return;
    const min = plot.posToVal(plot.select.left, "x");
    const max = plot.posToVal(plot.select.left + plot.select.width, "x");
    zooming = true;
    for (const other of plots) {
      other.setScale("x", { min, max });
      other.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    }
    zooming = false;
  }

  function showAll() {
    for (const plot of plots) plot.setScale("x", { min: plot.data[0][0], max: plot.data[0][plot.data[0].length - 1] });
  }

  function drawCharts() {
    const grid = byId("chart-grid");
    grid.textContent = "";
    plots = [];
    for (const section of data.sections) {
      const heading = element("h3", { class: "section" }, section.title);
      grid.append(heading);
      const before = plots.length;
      for (const chart of section.charts) {
        const keys = chart.keys.join(" ");
        const meaning = chart.keys.filter((key) => data.declared[key]).map((key) => key + ", " + data.declared[key].unit + ": " + data.declared[key].meaning).join("\n");
        const box = element("div", { class: "chart", "data-keys": keys, title: meaning }, element("h3", {}, chart.title));
        grid.append(box);
        const plot = drawChart(chart, box);
        if (plot) plots.push(plot); else box.remove();
      }
      if (plots.length === before) heading.remove();
    }
    root.dataset.charts = plots.length;
  }

  // -- timeline ---------------------------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  function shape(tag, attributes, title) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (title) {
      const text = document.createElementNS(SVG, "title");
      text.textContent = title;
      made.append(text);
    }
    return made;
  }

  const LANES = { train: ["#3b82f6", 0], publish: ["#f59e0b", 1], checkpoint: ["#8b5cf6", 2], fault: ["#ef4444", 3] };
  function drawTimeline() {
    const { spans, groups } = run.timeline;
    const scroll = byId("timeline-scroll");
    scroll.textContent = "";
    const end = Math.max(0, ...spans.map((s) => s[2]));
    if (!end) { byId("span-text").textContent = "no step is complete"; return; }
    const wide = scroll.clientWidth - 90, scale = (wide / end) * Math.pow(60, byId("zoom").value / 100);
    const x = (seconds) => 80 + Math.max(0, Math.min(seconds, end)) * scale;
    const rows = [];
    const placed = groups.map((g) => {
      const start = Math.max(0, g[2]), stop = g[5] === null ? end : g[5];
      let at = rows.findIndex((until) => until <= start);
      if (at < 0) at = rows.length;
      rows[at] = stop;
      return at;
    });
    const top = 4 * 20 + 16, height = top + rows.length * 7 + 24;
    const svg = shape("svg", { width: 90 + end * scale, height, id: "timeline-svg" });
    for (const [lane, [colour, at]] of Object.entries(LANES)) {
      const label = shape("text", { x: 4, y: at * 20 + 14 });
      label.textContent = lane;
      svg.append(label);
      for (const [of, from, to, text] of spans) {
        if (of !== lane) continue;
        svg.append(shape("rect", { x: x(from), y: at * 20 + 4, width: Math.max(1, x(to) - x(from)), height: 14, fill: colour, class: "span" },
          text + ": " + (to - from).toFixed(3) + " s"));
      }
    }
    const label = shape("text", { x: 4, y: top + 8 });
    label.textContent = "groups";
    svg.append(label);
    groups.forEach((g, i) => {
      const [ordinal, attempt, admitted, ready, leased, ended, how, lag] = g;
      const title = "group " + ordinal + (attempt ? " attempt " + attempt : "") + ": " + (how || "in progress") + (lag === null ? "" : ", lag " + lag);
      const y = top + placed[i] * 7, stop = ended === null ? end : ended;
      const part = (from, to, fill, what) => {
        if (from === null || to === null || to <= from) return;
        svg.append(shape("rect", { x: x(from), y, width: Math.max(0.5, x(to) - x(from)), height: 5, fill }, title + "; " + what + " " + (to - from).toFixed(2) + " s"));
      };
      part(admitted, ready === null ? stop : ready, how === "trained" || !how ? "#10b981" : "#ef4444", "generated for");
      part(ready, leased === null ? stop : leased, "#9ca3af", "waited in the queue for");
      part(leased, stop, "#3b82f6", "trained for");
    });
    for (let i = 0; i <= 10; i++) {
      const text = shape("text", { x: x((end * i) / 10), y: height - 6 });
      text.textContent = ((end * i) / 10).toFixed(1) + " s";
      svg.append(text);
    }
    scroll.append(svg);
    byId("span-text").textContent = "green: generated, grey: ready and waiting, blue: in the step; red: not trained";
  }

  // -- trajectories -----------------------------------------------------------------------------------------------

  function versionColour(version, first) {
    return "hsla(" + ((version - first) * 67 + 140) % 360 + ", 70%, 60%, 0.45)";
  }

  const IMAGE = /\ufffc([0-9a-f]{28})/, IMAGE_CHARS = 29;

  function withImages(text, box) {
    text.split(IMAGE).forEach((part, i) => {
      const source = i % 2 ? run.images[part] : undefined;
      box.append(source ? element("img", { src: source, alt: part }) : i % 2 ? "[image " + part + "]" : part);
    });
    return box;
  }

  function tokensOf(sample, box) {
    const shade = byId("shade").value;
    const text = Array.from(sample.response || ""), segments = sample.segments || [];
    const first = Math.min(...segments.map((s) => s[2]));
    if (!sample.ends) { withImages(sample.response, box); return; }
    let from = 0, at = 0, shown = 0;
    sample.ends.forEach((end, i) => {
      while (at < segments.length - 1 && i >= segments[at][1]) at++;
      const [, , version, replica, kind] = segments[at] || [0, 0, 0, 0, "policy"];
      const tool = kind === "environment", logprob = sample.logprobs[i];
      const span = element("span", { title: tool ? "written by the environment" : "version " + version + ", replica " + replica + ", log-probability " + logprob });
      const image = text.slice(from, from + IMAGE_CHARS).join("");
      if (from < shown) { from = Math.max(from, end); return; }
      if (text[from] === "\ufffc" && IMAGE.test(image)) { withImages(image, span); shown = from + IMAGE_CHARS; }
      else span.textContent = text.slice(from, end).join("");
      if (tool) span.className = "tool";
      else if (shade === "version") span.style.background = versionColour(version, first);
      else span.style.background = "rgba(239, 68, 68, " + Math.min(0.8, -logprob / 5) + ")";
      box.append(span);
      from = end;
    });
    if (from < text.length) box.append(text.slice(from).join(""));
  }

  function drawTrajectories() {
    const list = byId("trajectory-list"), wanted = byId("search").value.toLowerCase();
    list.textContent = "";
    const chosen = run.samples.filter((s) => ((s.prompt || "") + " " + (s.response || "")).toLowerCase().includes(wanted)).reverse();
    byId("matches").textContent = chosen.length + " of " + run.samples.length;
    for (const sample of chosen.slice(0, 60)) {
      const versions = [...new Set((sample.segments || []).filter((s) => s[4] !== "environment").map((s) => s[2]))];
      const asked = String(sample.prompt || "").replace(/\ufffc[0-9a-f]{28}/g, "[image] ");
      const head = "group " + sample.ordinal + "  reward " + sample.reward + "  " + sample.finish + "  " + asked.slice(0, 100);
      const details = element("details", { class: "trajectory" }, element("summary", {}, head));
      details.addEventListener("toggle", () => {
        if (!details.open || details.dataset.drawn) return;
        details.dataset.drawn = "1";
        const chips = versions.map((v) => {
          const chip = element("span", { class: "chip" }, "version " + v);
          chip.style.background = versionColour(v, Math.min(...versions));
          return chip;
        });
        const box = element("div", { class: "tokens" });
        tokensOf(sample, box);
        const prompt = withImages(sample.prompt || "", element("div", { class: "tokens" }));
        details.append(element("p", {}, ...chips, "answer: " + sample.ground_truth), prompt, box);
        for (const branch of sample.branches || []) {
          const parts = "from token " + branch.at_token + " on " + JSON.stringify(branch.text) + ", where the conversation above has ";
          details.append(element("p", {}, "another branch: " + parts + JSON.stringify(branch.main_text)));
          details.append(element("div", { class: "tokens" }, branch.response));
        }
      });
      list.append(details);
    }
  }

  // -- all of it --------------------------------------------------------------------------------------------------

  function drawScaled() { drawCharts(); drawTimeline(); }
  root.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
  byId("theme").addEventListener("click", () => { root.classList.toggle("dark"); drawScaled(); });
  byId("zoom").addEventListener("input", drawTimeline);
  byId("search").addEventListener("input", drawTrajectories);
  byId("shade").addEventListener("change", drawTrajectories);
  let timer = 0, width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(timer);
    timer = setTimeout(drawScaled, 200);
  });
  drawHead(); drawFindings(); drawTables(); drawScaled(); drawTrajectories();
  root.dataset.ready = "1";
})();
