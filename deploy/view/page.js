// The run page. It draws what the server's `data` says and asks for more every two seconds; as a file of its own it
// draws what is embedded in it. Everything of a run comes in as text and stays text: nothing is parsed as HTML.

const POLL_MILLISECONDS = 2000;
const FRAME_MILLISECONDS = 12; // of drawing between two frames: the page scrolls while it draws
const MOST_ALIGNED = 1000; // steps of a mean over seeds
const RETURNS = ["eval/return", "train/return"];
const RETURN_NAMES = { "eval/return": "evaluation", "train/return": "training episodes" };
// Told apart by most eyes, on light and on dark (after Okabe and Ito).
const COLORS = ["#2a78c2", "#d9772b", "#2e9e74", "#b8559e", "#c2a014", "#5aa9d6", "#c04a41", "#7b6cc4"];
const LEGENDS = {
  below: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom" },
  right: { traceorder: "reversed" }, // as they lie on each other
};
const CONFIG = { displayModeBar: false, responsive: true };

// In this order; a metric belongs to the first section that takes it.
const SECTIONS = [
  { title: "Speed", takes: /^time\/.*_per_s$/, open: true, empty: "No speed yet: it comes with the first losses." },
  { title: "What the time goes to", takes: /^time\/.*_ratio$/, open: true, empty: "", grid: "medium" },
  { title: "Losses", takes: /^loss\//, open: true, empty: "No losses yet: the learner has made no update." },
  { title: "Learner", takes: /^learner\//, open: true, empty: "" },
  { title: "Cluster", takes: /^cluster\//, open: true, empty: "" },
  { title: "Losses on replayed windows", takes: /^report\//, open: false, empty: "" },
  { title: "Episodes", takes: /^(eval|train)\//, open: false, empty: "" },
  { title: "Durations", takes: /^time\//, open: false, empty: "" },
  { title: "Counters and replay", takes: /^(counters|replay)\//, open: false, empty: "" },
  { title: "Others", takes: /./, open: false, empty: "" },
];

// What is done, in words: work at the bottom, what is waited for on top.
const DOING = {
  compute: ["updates", "#2a78c2"],
  acting: ["acts", "#2a78c2"],
  environment: ["steps environments", "#5aa9d6"],
  evaluation: ["evaluates", "#b8559e"],
  report: ["reports", "#7b6cc4"],
  publish: ["publishes", "#b8559e"],
  checkpoint: ["writes checkpoints", "#5aa9d6"],
  write_back: ["writes latents back", "#2e9e74"],
  other: ["other", "#9aa0a8"],
  idle: ["idle", "#9aa0a8"],
  replay: ["waits for the replay or the learner", "#d9772b"],
  batch: ["waits for batches", "#d9772b"],
  rows: ["waits for rows", "#c2a014"],
  snapshot: ["waits for a snapshot", "#c2a014"],
};
// Of these shares of one time there is a chart for each run and each of the two.
const SHARE = new RegExp(`^time/(actors|learner)_(${Object.keys(DOING).join("|")})_ratio$`);

// What a metric is measured in, by its name; the first that fits.
const UNITS = [
  [/env_steps_per_s$/, "steps per second"],
  [/updates_per_s$/, "updates per second"],
  [/^time\/.*_ratio$/, "share of the time"],
  [/train_ratio/, "replayed rows per row"],
  [/_seconds$/, "seconds"],
  [/_bytes$/, "bytes"],
  [/return(_min|_max)?$/, "return per episode"],
  [/\/length$/, "agent steps per episode"],
  [/asked_at_step$/, "environment steps"],
  [/lag_versions$/, "versions"],
  [/version$/, "version"],
  [/^loss\/|_loss$/, "loss"],
  [/norm$/, "norm"],
  [/\/rows|rows_held$/, "rows"],
  [/\/transitions$/, "transitions"],
  [/updates$/, "updates"],
  [/episodes$/, "episodes"],
  [/\/actors$/, "actors"],
];

const NOTABLE = 0.01; // what never took so much of the time is left out
const PERCENT = { tickformat: ".0%", range: [0, 1.02] };
const PURE = /^(loss|learner|report)\//; // numbers without a unit, which a prefix like 50µ would hide

const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en").format;
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 }).format;
const quiet = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // plotly reads tags in names
const last = (list) => list[list.length - 1];

/** An element with properties, and children that are elements or text. */
function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// What the page knows.

const runs = []; // {told, series: Map(key -> {x, y}), thinned, have, hidden, card}
const charts = new Map(); // id -> {box, plot, title, keys, content, run, visible, dirty}
let references = {};
let points = Infinity;

const color = (run) => COLORS[run.told.group % COLORS.length];
const readable = (run) => run.told.group !== undefined;
const shown = () => runs.filter((run) => readable(run) && !run.hidden);

/** Takes a document of the server's. */
function take(told) {
  references = told.references ?? references;
  points = told.points ?? points;
  const changed = new Set();
  told.runs.forEach((news, number) => {
    const run = (runs[number] ??= { series: new Map(), thinned: {}, have: "0-", hidden: false });
    if (run.told && run.told.group !== news.group) for (const key of run.series.keys()) changed.add(key);
    run.told = news;
    if (news.metrics) for (const key of grow(run, news.metrics)) changed.add(key);
  });
  document.title = `${runs.map((run) => run.told.name).join(", ")} - Telamon`;
  runs.forEach(showRun);
  showCharts(changed);
  showPictures();
  showSettings(told.settings);
  showWarnings();
  showThinned();
}

/** Adds a piece of a run's metrics, or begins again with it; returns the metrics that changed. */
function grow(run, piece) {
  const changed = new Set(Object.keys(piece.series));
  if (piece.whole) {
    for (const key of run.series.keys()) changed.add(key);
    run.series.clear();
    run.thinned = {};
  }
  Object.assign(run.thinned, piece.thinned);
  run.have = `${piece.place.offset}-${piece.place.seal}`;
  for (const [key, [x, y]] of Object.entries(piece.series)) {
    const series = run.series.get(key) ?? { x: [], y: [] };
    run.series.set(key, { x: series.x.concat(x), y: series.y.concat(y) });
    if (series.x.length + x.length > 2 * points) run.have = "0-"; // the server thins it out again
  }
  return changed;
}

// Curves.

/** Values of one step become their mean; what was not finite is left out. */
function byStep({ x, y }) {
  const steps = [];
  const values = [];
  let count = 0;
  for (let i = 0; i < x.length; i++) {
    if (y[i] === null) continue;
    if (steps.length && last(steps) === x[i]) {
      count += 1;
      values[values.length - 1] += (y[i] - last(values)) / count;
    } else {
      count = 1;
      steps.push(x[i]);
      values.push(y[i]);
    }
  }
  return { x: steps, y: values };
}

/** The mean of each point and of up to `count` - 1 before it. */
function smooth({ x, y }, count) {
  if (count === 1) return { x, y };
  let sum = 0;
  return {
    x,
    y: y.map((value, i) => {
      sum += value - (i >= count ? y[i - count] : 0);
      return sum / Math.min(i + 1, count);
    }),
  };
}

/**
 * Curves on one axis: their steps, evenly thinned out where they are more than a screen shows. Between its own points a
 * curve is straight, outside of them it is null.
 */
function align(curves) {
  const steps = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const every = curves.length > 1 ? Math.ceil(steps.length / MOST_ALIGNED) : 1;
  const x = steps.filter((_, i) => i % every === 0 || i === steps.length - 1);
  const rows = curves.map((curve) => {
    let i = 0;
    return x.map((step) => {
      while (i < curve.x.length && curve.x[i] < step) i += 1;
      if (i === curve.x.length || (i === 0 && curve.x[0] !== step)) return null;
      if (curve.x[i] === step) return curve.y[i];
      const share = (step - curve.x[i - 1]) / (curve.x[i] - curve.x[i - 1]);
      return curve.y[i - 1] + share * (curve.y[i] - curve.y[i - 1]);
    });
  });
  return { x, rows };
}

/** Mean, lowest and highest of aligned rows at each of their steps. */
function spread(rows) {
  const columns = rows[0].map((_, i) => rows.map((row) => row[i]).filter((value) => value !== null));
  return {
    mean: columns.map((column) => (column.length ? column.reduce((a, b) => a + b) / column.length : null)),
    low: columns.map((column) => (column.length ? Math.min(...column) : null)),
    high: columns.map((column) => (column.length ? Math.max(...column) : null)),
  };
}

/** Runs by group: seeds of one experiment. */
function experiments(members) {
  const groups = new Map();
  for (const run of members) groups.set(run.told.group, [...(groups.get(run.told.group) ?? []), run]);
  return [...groups.values()];
}

/** The name of an experiment: its run's, or what the names of its runs begin with. */
function title(group) {
  if (group.length === 1) return group[0].told.name;
  const names = group.map((run) => run.told.name);
  let stem = names[0];
  while (!names.every((name) => name.startsWith(stem))) stem = stem.slice(0, -1);
  stem = stem.replace(/[-_ /]*(seed|s)?[-_ ]*$/, "") || group[0].told.algorithm;
  return `${stem}, ${group.length} seeds`;
}

/** A line, and a band around it where there are several rows. */
function lines(x, rows, name, rowNames, style) {
  const common = { x, legendgroup: name + style.key, mode: "lines" };
  const { mean, low, high } = rows.length > 1 ? spread(rows) : { mean: rows[0] };
  const band = { ...common, hoverinfo: "skip", showlegend: false, line: { width: 0, color: style.color } };
  const seeds = rowNames.map((row, i) => `<br>${quiet(row)}: %{customdata[${i}]}`).join("");
  const line = {
    ...common,
    y: mean,
    name: quiet(name),
    showlegend: style.legend,
    opacity: style.faint ? 0.5 : 1,
    mode: !style.faint && x.length < 40 ? "lines+markers" : "lines",
    line: { color: style.color, width: style.faint ? 1 : 1.8, dash: style.dash ?? "solid" },
    marker: { size: 5, color: style.color, symbol: style.symbol ?? "circle" },
    hovertemplate: `<b>${quiet(name)}</b><br>%{x:,} environment steps<br>%{y:.4~g}${rows.length > 1 ? " on average" : ""}${seeds}<extra></extra>`,
  };
  if (rows.length < 2) return [line];
  line.customdata = x.map((_, i) => rows.map((row) => (row[i] === null ? "-" : short(row[i]))));
  const fill = style.color + "2e";
  return [{ ...band, y: low }, { ...band, y: high, fill: "tonexty", fillcolor: fill }, line];
}

/** The curves of a metric in runs; `style` as in `lines`. */
function curves(key, members, style) {
  const count = RETURNS[0] === key ? 1 : Number($("smooth").value); // an evaluation is a mean already
  return experiments(members.filter((run) => run.series.has(key))).flatMap((group) => {
    const seeds = group.map((run) => smooth(byStep(run.series.get(key)), count));
    const { x, rows } = align(seeds);
    const own = { key, color: color(group[0]), ...style };
    const name = title(group) + (style.what ? `: ${style.what}` : "");
    const names = group.length > 1 ? group.map((run) => `seed ${run.told.seed}`) : [];
    const single = group.map((run, i) => ({
      ...lines(seeds[i].x, [seeds[i].y], `${name}, seed ${run.told.seed}`, [], { ...own, legend: false, faint: true })[0],
      legendgroup: name + key,
    }));
    return [...lines(x, rows, name, names, own), ...(group.length > 1 && $("seeds").checked ? single : [])];
  });
}

/** The chart of a task's returns: the metric of the reference, or evaluations, in front; the other one faintly. */
function returns(task) {
  const members = shown().filter((run) => run.told.task === task);
  const reference = references[task];
  const has = (key) => members.some((run) => run.series.has(key));
  const front = reference?.metric ?? (has(RETURNS[0]) ? RETURNS[0] : RETURNS[1]);
  const back = RETURNS.find((key) => key !== front);
  const ends = members.flatMap((run) => RETURNS.map((key) => last(run.series.get(key)?.x ?? [0])));
  let right = Math.max(1, ...ends);
  const traces = [];
  if (reference) {
    const name = `${reference.label}: ${RETURN_NAMES[reference.metric]}, ${reference.values.length} seeds`;
    const style = { key: "reference", color: "#8a8f98", dash: "dash", symbol: "square", legend: true };
    traces.push(...lines(reference.steps, reference.values, name, [], style));
    right = reference.steps.find((step) => step >= right) ?? right; // up to its next point
  }
  traces.push(...curves(back, members, { what: RETURN_NAMES[back], faint: true, legend: true }));
  traces.push(...curves(front, members, { what: RETURN_NAMES[front], legend: true }));
  return { traces, right, y: { title: "return per episode" }, legend: "below" };
}

/** The chart of what actors or learner of a run spend their time on: shares on top of each other. */
function shares(run, who) {
  const traces = Object.entries(DOING).flatMap(([thing, [name, fillcolor]]) => {
    const series = run.series.get(`time/${who}_${thing}_ratio`);
    if (!series || Math.max(...series.y) < NOTABLE) return [];
    const hovertemplate = `${name}: %{y:.0%}<br>%{x:,} environment steps<extra></extra>`;
    return [{ ...series, name, fillcolor: `${fillcolor}d0`, hovertemplate, stackgroup: "all", mode: "lines", line: { width: 0, color: fillcolor } }];
  });
  return { traces, y: { ...PERCENT, range: [0, 1], title: "share of the time" }, legend: "right" };
}

/** The chart of one metric: a line per experiment. */
function metric(key) {
  const title = UNITS.find(([pattern]) => pattern.test(key))?.[1] ?? "value";
  const format = /^time\/.*_ratio$/.test(key) ? PERCENT : { exponentformat: PURE.test(key) ? "e" : "SI", minexponent: 4 };
  return { traces: curves(key, shown(), { legend: false }), y: { ...format, title } };
}

/** What plotly draws of a chart. */
function figure({ traces, y, right, legend }) {
  const style = getComputedStyle(document.documentElement);
  const [ink, faint, grid, card] = ["--ink", "--faint", "--grid", "--card"].map((name) => style.getPropertyValue(name));
  const font = { color: ink, size: 12, family: style.fontFamily };
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickcolor: faint, automargin: true };
  const words = (text) => ({ text, standoff: 8, font: { size: 12, color: faint } });
  const range = right ? { range: [0, 1.02 * right] } : { rangemode: "tozero" };
  return [
    traces,
    {
      uirevision: "kept", // what somebody has zoomed to stays when data comes
      margin: { l: 10, r: 14, t: 12, b: 10 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font,
      hovermode: "closest",
      hoverlabel: { bgcolor: card, bordercolor: faint, font },
      showlegend: legend !== undefined,
      legend: { font: { size: 12 }, ...LEGENDS[legend] },
      xaxis: { ...axis, title: words("environment steps"), tickformat: "~s", ...range },
      yaxis: { ...axis, ...y, title: words(y.title) },
    },
  ];
}

// Charts: made when their metric appears, drawn when they are seen and something of theirs has changed.

const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      const chart = charts.get(target.id);
      chart.visible = isIntersecting;
      if (isIntersecting) queue(chart);
    }
  },
  { rootMargin: "400px" },
);
const waiting = new Set();
let began = null; // when the redraw began that is going on

function stale(chart) {
  chart.dirty = true;
  queue(chart);
}

function queue(chart) {
  if (!chart.dirty || !chart.visible) return;
  waiting.add(chart);
  if (began === null) {
    began = { at: performance.now(), charts: 0, longest: 0 };
    requestAnimationFrame(draw);
  }
}

function draw() {
  const start = performance.now();
  for (const chart of waiting) {
    const before = performance.now();
    waiting.delete(chart);
    chart.dirty = false;
    Plotly.react(chart.plot, ...figure(chart.content()), CONFIG);
    began.charts += 1;
    began.longest = Math.max(began.longest, performance.now() - before);
    if (performance.now() - start > FRAME_MILLISECONDS) break;
  }
  if (waiting.size) {
    requestAnimationFrame(draw);
    return;
  }
  // for whoever wants to know how long it takes: all of them, and the longest, for which the page stood still
  document.body.dataset.milliseconds = Math.round(performance.now() - began.at);
  document.body.dataset.longest = Math.round(began.longest);
  document.body.dataset.charts = began.charts;
  began = null;
}

/** Adds a chart unless it is there. keys: what it shows; content: makes what `figure` takes; run: the one it is of. */
function addChart(id, parent, { title, keys, content, size = "", run = null }) {
  if (charts.has(id)) return;
  const plot = make("div", { className: `plot ${size}` });
  const box = make("div", { className: "card", id }, make("h3", {}, title), plot);
  charts.set(id, { box, plot, title, keys, content, run, visible: false, dirty: true });
  box.style.order = run ? runs.indexOf(run) : runs.length; // what is of one run comes first, run by run
  parent.append(box);
  watcher.observe(box);
}

function showCharts(changed) {
  for (const task of new Set(runs.filter(readable).map((run) => run.told.task))) {
    const keys = (key) => RETURNS.includes(key);
    addChart(`task ${task}`, grids.returns, { title: task, keys, content: () => returns(task), size: "large" });
  }
  for (const key of [...new Set(runs.flatMap((run) => [...run.series.keys()]))].sort()) {
    if (RETURNS.includes(key)) continue;
    const parent = grids[SECTIONS.find(({ takes }) => takes.test(key)).title];
    const who = SHARE.exec(key)?.[1];
    if (!who) addChart(`metric ${key}`, parent, { title: key, keys: (other) => other === key, content: () => metric(key) });
    for (const run of who ? runs.filter((run) => run.series.has(key)) : []) {
      const title = `${run.told.name}: ${who}`;
      const keys = (other) => SHARE.exec(other)?.[1] === who;
      addChart(`shares ${title}`, parent, { title, keys, content: () => shares(run, who), size: "middle", run });
    }
  }
  for (const chart of charts.values()) if ([...changed].some(chart.keys)) stale(chart);
  const learned = runs.some((run) => RETURNS.some((key) => run.series.has(key)));
  say(grids.returns, learned ? "" : "No return yet: no episode has ended and no evaluation was made.");
  filter();
}

/** A sentence in place of what is not there; an empty one takes it away. */
function say(place, sentence) {
  const old = place.parentElement.querySelector(":scope > .empty");
  if (old) old.remove();
  if (sentence) place.before(make("p", { className: "empty" }, sentence));
}

/** Leaves what the search asks for. */
function filter() {
  const wanted = $("search").value.trim().toLowerCase();
  const fits = (text) => text.toLowerCase().includes(wanted);
  for (const { box, title, run } of charts.values()) {
    if (box.parentElement !== grids.returns) box.hidden = !fits(title) || (run?.hidden ?? false);
  }
  for (const { title, empty, details } of SECTIONS) {
    const boxes = [...grids[title].children];
    const count = boxes.filter((box) => !box.hidden).length;
    details.querySelector("small").textContent = boxes.length ? whole(count) : "";
    details.hidden = boxes.length ? count === 0 : !empty || wanted !== "";
    if (wanted && count) details.open = true;
    say(grids[title], boxes.length ? "" : empty);
  }
  for (const row of $("settings").querySelectorAll("tbody tr")) row.hidden = !fits(row.cells[0].textContent);
  if (wanted) for (const details of $("settings").querySelectorAll("details")) details.open = true;
}

const grids = { returns: make("div", { className: "grid wide" }) };
$("returns").append(grids.returns);
for (const section of SECTIONS) {
  grids[section.title] = make("div", { className: `grid ${section.grid ?? ""}` });
  const summary = make("summary", {}, section.title, make("small"));
  section.details = make("details", { open: section.open }, summary, grids[section.title]);
  $("charts").append(section.details);
}

// Runs.

const cards = make("div", { className: "grid" });
$("runs").append(cards);

function showRun(run) {
  if (!run.card) {
    const check = make("input", { type: "checkbox", checked: true, title: "draw this run" });
    check.addEventListener("change", () => {
      run.hidden = !check.checked;
      run.card.classList.toggle("hidden", run.hidden);
      redraw();
      filter();
    });
    run.badge = make("span");
    const name = make("label", { className: "name" }, check, make("span", {}, run.told.name), run.badge);
    run.body = make("div");
    run.card = make("article", { className: "card run" }, name, run.body);
    cards.append(run.card);
  }
  const told = run.told;
  run.badge.textContent = told.standing ? told.standing.state.replace("unknown", "no status") : "unreadable";
  run.badge.className = `badge ${told.standing?.state ?? "failed"}`;
  if (!readable(run)) {
    run.body.replaceChildren(make("p", { className: "problem" }, told.problem));
    return;
  }
  run.card.style.setProperty("--color", color(run));
  const at = Math.max(0, ...[...run.series.values()].map(({ x }) => last(x) ?? 0));
  const newest = (key) => last(run.series.get(key)?.y ?? []);
  const facts = [["environment steps", `${whole(at)} of ${whole(told.steps)}`]];
  const fact = (label, key, suffix = "") => {
    if (typeof newest(key) === "number") facts.push([label, short(newest(key)) + suffix]);
  };
  if (newest("counters/updates")) facts.push(["updates", whole(newest("counters/updates"))]);
  fact("evaluation", "eval/return");
  fact("last episode", "train/return");
  fact("speed", "time/env_steps_per_s", " steps/s");
  const list = facts.map(([label, text]) => make("div", {}, make("dt", {}, label), make("dd", {}, text)));
  run.body.replaceChildren(
    make("p", { className: "what", title: told.path }, `${told.algorithm} on ${told.task}, seed ${told.seed}`),
    progress(at / told.steps),
    make("dl", {}, ...list),
    ...(told.problem ? [make("p", { className: "problem" }, told.problem)] : []),
    ...(told.standing.says ? [make("p", { className: "note" }, told.standing.says)] : []),
    ...(told.standing.parts.length ? [parts(run)] : []),
  );
}

function progress(share) {
  const done = make("div");
  done.style.width = `${100 * Math.min(1, share)}%`;
  return make("div", { className: "progress" }, done);
}

/** Who runs where, and what each does or waits for. */
function parts(run) {
  const rows = run.told.standing.parts.map((part) =>
    make("tr", {}, make("th", {}, part.name), ...[part.now, part.numbers, part.where].map((text) => make("td", {}, text))),
  );
  const table = make("div", { className: "scroll" }, make("table", {}, make("tbody", {}, ...rows)));
  const count = rows.length === 1 ? "1 part" : `${rows.length} parts`;
  const details = make("details", { className: "inner", open: run.open ?? false }, make("summary", {}, count), table);
  details.addEventListener("toggle", () => (run.open = details.open));
  return details;
}

// Pictures.

const NO_PICTURES = "No pictures yet: reports of DreamerV3 and videos of evaluations appear here.";
const OPEN_LOOP =
  "Open loop: the model observes the first rows of a window and foresees the rest from the actions alone. Images show " +
  "what came, what was foreseen and the error (grey is none) below each other, in a frame that is green while it observes.";
const gallery = make("div", { className: "grid wide" });
$("pictures").append(gallery);

function showPictures() {
  for (const run of runs) {
    const news = JSON.stringify(run.told.pictures ?? []);
    if (news === run.pictures) continue;
    run.pictures = news;
    run.films ??= new Map(); // title -> step that is looked at, null for the newest
    const films = Map.groupBy(run.told.pictures ?? [], (picture) => picture.title);
    const figures = [...films].map(([name, pictures]) => film(run, name, pictures));
    run.gallery ??= gallery.appendChild(make("div", { className: "gallery" }));
    run.gallery.replaceChildren(...figures);
  }
  const titles = runs.flatMap((run) => (run.told.pictures ?? []).map((picture) => picture.title));
  say(gallery, titles.length ? (titles.some((name) => name.startsWith("openloop")) ? OPEN_LOOP : "") : NO_PICTURES);
}

/** Pictures of one thing, with a slider over the steps at which they were made. */
function film(run, name, pictures) {
  const steps = [...new Set(pictures.map((picture) => picture.step))].sort((a, b) => a - b);
  const slider = make("input", { type: "range", min: 0, max: steps.length - 1, title: "which one" });
  const kept = steps.indexOf(run.films.get(name) ?? last(steps));
  slider.value = kept < 0 ? steps.length - 1 : kept;
  const when = make("span", { className: "note" });
  const place = make("div");
  const show = () => {
    const number = Number(slider.value);
    const step = steps[number];
    when.textContent = step === null ? "" : `at ${whole(step)} environment steps, ${number + 1} of ${steps.length}`;
    const now = pictures.filter((picture) => picture.step === step);
    place.replaceChildren(...now.sort((a, b) => b.film - a.film).map(medium));
  };
  slider.addEventListener("input", () => {
    const number = Number(slider.value);
    run.films.set(name, number === steps.length - 1 ? null : steps[number]);
    show();
  });
  show();
  const heading = make("h3", {}, `${run.told.name}: ${name}`);
  const caption = make("figcaption", {}, heading, when, ...(steps.length > 1 ? [slider] : []));
  return make("figure", { className: "film card" }, caption, place);
}

function medium(picture) {
  if (picture.source === null) {
    return make("p", { className: "empty" }, `${picture.name} is left out: this file would have become too large.`);
  }
  if (picture.film) {
    return make("video", { src: picture.source, controls: true, loop: true, muted: true, autoplay: true, playsInline: true });
  }
  const image = make("img", { src: picture.source, alt: picture.name, loading: "lazy" });
  const strip = make("div", { className: "strip" }, image);
  // strips of small frames keep their pixels; drawings are scaled like any picture
  image.addEventListener("load", () => strip.classList.toggle("smooth", image.naturalHeight > 400));
  return strip;
}

// Settings and warnings.

function showSettings(settings) {
  const names = runs.map((run) => run.told.name);
  const news = JSON.stringify([settings, names]);
  if (news === $("settings").dataset.shown) return;
  $("settings").dataset.shown = news;
  const differing = settings.filter(({ differs }) => differs);
  const same = settings.filter(({ differs }) => !differs);
  const parts = [make("h2", {}, "Settings")];
  if (runs.length > 1) {
    parts.push(
      differing.length
        ? table(["differs", ...names], differing, (values) => values)
        : make("p", { className: "empty" }, "All settings are the same."),
    );
  }
  if (same.length) {
    const summary = make("summary", {}, runs.length > 1 ? `${same.length} settings that are the same` : `${same.length} settings`);
    const all = table(["setting", "value"], same, (values) => values.slice(0, 1));
    parts.push(make("details", { className: "inner" }, summary, all));
  }
  $("settings").replaceChildren(...parts);
  filter();
}

function table(headings, settings, pick) {
  const head = make("tr", {}, ...headings.map((heading) => make("th", {}, heading)));
  const rows = settings.map(({ key, values }) => {
    const cells = pick(values).map((value, i) => make("td", { className: i && value !== values[0] ? "other" : "" }, value ?? "-"));
    return make("tr", {}, make("th", {}, key), ...cells);
  });
  return make("div", { className: "card scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function showWarnings() {
  const found = runs.flatMap((run) => (run.told.warnings ?? []).map((warned) => ({ run: run.told.name, ...warned })));
  const news = JSON.stringify(found);
  if (news === $("warnings").dataset.shown) return;
  $("warnings").dataset.shown = news;
  const rows = found.map(({ time, level, run, part, text }) =>
    make("tr", {}, make("th", {}, time.replace("T", " ").replace(/\.\d+Z$/, "")), make("td", { className: `level ${level}` }, level.toLowerCase()),
      make("td", {}, run), make("td", {}, part), make("td", {}, text)),
  );
  const head = ["time (UTC)", "level", "run", "log", "event"].map((heading) => make("th", {}, heading));
  const listed = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  const empty = make("p", { className: "empty" }, "No warnings in the logs.");
  $("warnings").replaceChildren(make("h2", {}, "Warnings"), rows.length ? make("div", { className: "card scroll" }, listed) : empty);
}

function showThinned() {
  const found = runs.flatMap((run) => {
    const counts = Object.values(run.thinned);
    return counts.length ? [`${counts.length} metrics of ${run.told.name} (up to ${whole(Math.max(...counts))} points)`] : [];
  });
  $("thinned").textContent = found.length
    ? `Thinned out to about ${whole(points)} points each, the lowest and the highest of every stretch: ${found.join(", ")}.`
    : "";
}

// To begin with.

function redraw() {
  for (const chart of charts.values()) stale(chart);
}

$("search").addEventListener("input", filter);
$("smooth").addEventListener("change", redraw);
$("seeds").addEventListener("change", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

function fresh(text, kind) {
  $("fresh").textContent = text;
  $("fresh").className = kind;
}

/** What is new; null where nobody answers, or only half. */
async function news() {
  const have = new URLSearchParams(runs.map((run) => ["have", run.have]));
  const answer = fetch(`data?${have}`, { cache: "no-store" });
  return answer.then((response) => (response.ok ? response.json() : null)).catch(() => null);
}

async function follow() {
  if (!document.hidden) {
    const told = await news();
    if (told) take(told);
    if (told) fresh(`live, ${new Date(1000 * told.seconds).toLocaleTimeString()}`, "live");
    else fresh("the server has gone; start telamon view again", "gone");
  }
  setTimeout(follow, POLL_MILLISECONDS);
}

if ($("data")) {
  const told = JSON.parse($("data").textContent);
  take(told);
  fresh(`as of ${new Date(1000 * told.seconds).toLocaleString()}`, "");
} else {
  follow();
}
