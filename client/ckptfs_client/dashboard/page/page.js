// The page of `ckptfs web`: it draws figures.json every two seconds. All words come from the server, and enter the page as text only.
"use strict";

const EVERY_MS = 2000, PATIENCE_MS = 8000;
const SIGNS = {safe: "✓", copied: "✓", exposed: "!", unverified: "?", lost: "✕", absent: "–", silent: "✕"};
const GRAVITY = ["lost", "silent", "unverified", "exposed", "absent", "copied", "safe"];
const SVG = "http://www.w3.org/2000/svg";
const main = document.querySelector("main"), clock = document.querySelector("#clock");
const opened = new Map();  // Key of a series: its sets, or null while they are fetched.
let answered = null;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(name, value);
  element.append(...children.flat().filter(child => child !== null && child !== ""));
  return element;
}
const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const badge = (state, words) => make("span", {class: `badge ${state}`}, words);

function table(caption, columns, rows) {
  // A column is [name, whether it holds numbers]; a cell is text or an element; a row may be an element of its own.
  const shown = columns.map((_, at) => rows.some(row => !Array.isArray(row) || row[at] !== ""));
  const head = columns.map(([name, isNumber], at) => shown[at] ? make("th", {scope: "col", class: isNumber ? "number" : undefined}, name) : null);
  const body = rows.map(row => Array.isArray(row) ? make("tr", {}, row.map((cell, at) => {
    const attributes = {"data-label": columns[at][0], class: columns[at][1] ? "number" : undefined};
    if (!shown[at]) return null;
    return at === 0 ? make("th", {scope: "row", ...attributes}, cell) : make("td", attributes, cell);
  })) : row);
  return make("table", {"aria-label": caption}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, body));
}

function verdict(mount) {
  return make("div", {class: `card verdict ${mount.state}`},
    make("div", {class: "sign", "aria-hidden": "true"}, SIGNS[mount.state]),
    make("div", {}, make("p", {class: "title"}, mount.title), make("p", {class: "detail"}, mount.detail),
      mount.notes.map(note => make("p", {class: "note"}, note))));
}

function tiles(mount) {
  const backlogs = mount.backlogs.map(one => make("div", {class: "card tile"},
    make("span", {class: "what"}, one.name === "write-back" ? "waits for write-back to the PFS" : "waits for copies on other nodes"),
    make("span", {class: "figure"}, one.behind),
    make("span", {class: "more"}, [one.lag && `the oldest for ${one.lag}`, one.trend].filter(Boolean).join("; "))));
  const tiers = mount.tiers.map(one => {
    const percent = one.share === null ? null : Math.round(100 * one.share);
    const track = percent === null ? null : make("div", {class: percent >= 90 ? "track tight" : "track", role: "meter",
      "aria-label": `used part of ${one.name}`, "aria-valuenow": percent, "aria-valuemin": 0, "aria-valuemax": 100}, make("div", {}));
    if (track) track.firstChild.style.width = `${percent}%`;
    return make("div", {class: "card tile"}, make("span", {class: "what"}, one.name === "pfs" ? "PFS" : `${one.name === "ram" ? "RAM" : "NVMe"} tier`,
      one.health === "normal" ? "" : " ", one.health === "normal" ? "" : badge(one.health, one.health)), track,
      make("span", {class: "more"}, one.size === "" ? "not known" : one.used === "" ? `${one.free} free of ${one.size}` : `${one.used} used of ${one.size}`));
  });
  return [make("div", {class: "tiles backlogs"}, backlogs), make("div", {class: "tiles"}, tiers)];
}

function troubles(mount) {
  if (!mount.troubles.length) return null;
  const items = mount.troubles.map(one => make("li", {}, make("strong", {}, one.where), `: ${one.what}`,
    one.remedy && make("span", {class: "remedy"}, `; ${one.remedy}`), one.age && ` (for ${one.age})`));
  return make("div", {class: "card troubles"}, make("h3", {}, mount.troubles.length === 1 ? "1 trouble" : `${mount.troubles.length} troubles`),
    make("ul", {}, items));
}

function line(times, values, span, top) {
  // Path of one backlog; a sample without an answer interrupts it. Returns [stroke, area].
  let stroke = "", area = "", run = [];
  const end = () => {
    if (run.length) {
      const points = run.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L");
      stroke += `M${points}${run.length === 1 ? "h0.01" : ""}`;
      area += `M${run[0][0].toFixed(2)} 100L${points}L${run[run.length - 1][0].toFixed(2)} 100Z`;
    }
    run = [];
  };
  values.forEach((value, at) => value === null ? end() : run.push([1000 * (1 + times[at] / span), 100 * (1 - value / top)]));
  end();
  return [stroke, area];
}

function plot(mount) {
  const names = Object.keys(mount.plot.values), ticks = mount.plot.ticks, times = mount.plot.at_s;
  if (!names.length) return null;
  const span = Math.max(1, -times[0]), top = ticks[ticks.length - 1][0];
  const lines = names.flatMap((name, at) => {
    const [stroke, area] = line(times, mount.plot.values[name], span, top), kind = name === "write-back" ? "first" : "second";
    return [draw("path", {class: `area ${kind}`, d: area}), draw("path", {class: kind, d: stroke})];
  });
  const grid = ticks.map(([value]) => draw("line", {x1: 0, x2: 1000, y1: 100 * (1 - value / top), y2: 100 * (1 - value / top)}));
  const words = mount.backlogs.map(one => `${one.name}: ${one.behind}`).join("; ");
  const legend = names.map(name => make("li", {}, draw("svg", {viewBox: "0 0 32 8", "aria-hidden": "true"},
    draw("line", {x1: 0, x2: 32, y1: 4, y2: 4, class: name === "write-back" ? "first" : "second"})), `waits for ${name}`));
  return make("div", {class: "card"}, make("h3", {}, "Write-back and replication"), make("ul", {class: "legend"}, legend),
    make("div", {class: "plot"}, make("div", {class: "scale", "aria-hidden": "true"}, ticks.slice().reverse().map(([, label]) => make("span", {}, label))),
      draw("svg", {viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": `Bytes that wait, over time. Now ${words}`}, grid, lines),
      make("div", {class: "time"}, make("span", {}, `${mount.plot.span} ago`), make("span", {}, "now"))));
}

function series(mount) {
  if (!mount.series.length) return null;
  const columns = [["series"], ["newest set"], ["step", true], ["level"], ["size", true], ["age", true], ["sets", true], [""]];
  const rows = mount.series.flatMap(one => {
    const key = `${mount.mountpoint} ${one.id}`, isOpen = opened.has(key);
    const button = make("button", {"data-key": key, "aria-expanded": isOpen, "aria-label": `sets of ${one.name}`}, isOpen ? "hide" : "show");
    button.addEventListener("click", () => { toggle(key, mount.mountpoint, one.id); });
    const row = [one.name, one.rollback ? `${one.newest} (${one.rollback})` : one.newest, one.step, badge(one.state, `${SIGNS[one.state]} ${one.level}`), one.size,
      one.age, String(one.sets), button];
    return isOpen ? [row, make("tr", {}, make("td", {colspan: columns.length, class: "whole"}, make("div", {class: "inner"}, sets(one, opened.get(key)))))] : [row];
  });
  return make("div", {class: "card scroll"}, make("h3", {}, "Checkpoints"), table("series of checkpoints", columns, rows),
    mount.more_series ? make("p", {class: "rest"}, `and ${mount.more_series} older series`) : null);
}

function sets(one, found) {
  if (!found) return "asking";
  return table(`sets of ${one.name}`, [["set"], ["step", true], ["level"], ["files", true], ["size", true], ["age", true], ["kept"]],
    found.map(each => [each.name, each.step, badge(each.state, `${SIGNS[each.state]} ${each.level}`), String(each.files), each.size, each.age, each.kept]));
}

function nodes(mount) {
  if (!mount.nodes.length) return null;
  const columns = [["node"], ["state"], ["failure domain"], ["copies go to"], ["behind"], ["oldest", true], ["holds for others"]];
  const rows = mount.nodes.map(one => [one.name, badge(one.state, `${one.state === "alive" ? "✓" : one.state === "dead" ? "✕" : "?"} ${one.state}`), one.domain,
    one.copies_to, one.behind, one.lag, one.holds]);
  return make("div", {class: "card scroll"}, make("h3", {}, "Nodes"), make("p", {class: "rest"}, mount.cluster), table("nodes of the cluster", columns, rows),
    mount.more_nodes ? make("p", {class: "rest"}, `and ${mount.more_nodes} nodes more`) : null);
}

function section(mount) {
  const health = badge(mount.health, mount.health);
  return make("section", {class: "mount", "aria-label": mount.name},
    make("div", {class: "head"}, make("h2", {}, `${mount.name} on ${mount.mountpoint} `, health), make("p", {class: "facts"}, mount.facts)),
    verdict(mount), tiles(mount), troubles(mount), plot(mount), series(mount), nodes(mount));
}

function render(figures) {
  const worst = GRAVITY.find(state => figures.mounts.some(mount => mount.state === state));
  const title = worst ? figures.mounts.find(mount => mount.state === worst).title : "nothing mounted";
  document.title = `${worst ? SIGNS[worst] : "–"} ${title}: ckptfs on ${figures.host}`;
  document.querySelector("#host").textContent = `on ${figures.host}`;
  const focused = document.activeElement && document.activeElement.dataset.key;
  const empty = make("div", {class: "card verdict absent"}, make("div", {class: "sign", "aria-hidden": "true"}, "–"), make("div", {},
    make("p", {class: "title"}, "Nothing is mounted"), make("p", {class: "detail"}, "No ckptfs is mounted on ", figures.host, ". ",
      make("code", {}, "mount -t ckptfs NAME DIR"), " mounts one.")));
  main.replaceChildren(...(figures.mounts.length ? figures.mounts.map(section) : [empty]));
  if (focused) for (const button of main.querySelectorAll("button")) if (button.dataset.key === focused) button.focus({preventScroll: true});
}

async function ask(path) {
  const reply = await fetch(path, {signal: AbortSignal.timeout(PATIENCE_MS)});
  if (!reply.ok) throw new Error(reply.statusText);
  return reply.json();
}

async function askSets(key, mountpoint, id) {
  const found = await ask(`sets.json?${new URLSearchParams({mount: mountpoint, series: id})}`).catch(() => []);
  if (opened.has(key)) opened.set(key, found);
}

async function toggle(key, mountpoint, id) {
  if (opened.delete(key)) return refresh();
  opened.set(key, null);
  await askSets(key, mountpoint, id);
  return refresh();
}

async function refresh() {
  try {
    const figures = await ask("figures.json");
    render(figures);
    answered = new Date(1000 * figures.at);
    clock.textContent = `as of ${answered.toLocaleTimeString()}`;
    document.body.classList.toggle("old", Date.now() - answered > 30000);
  } catch {
    clock.textContent = `ckptfs web does not answer; the figures are ${answered ? `of ${answered.toLocaleTimeString()}` : "not there yet"}`;
    document.body.classList.add("old");
  }
}

async function follow() {
  await refresh();
  document.body.dataset.ready = "yes";
  setTimeout(follow, EVERY_MS);
}

follow();
