// The station's pages: show what /api tells about the line, and send the second verdict of a person.
//
// Guarantees: text of the line enters the page as text nodes and attributes, never as markup. Nodes are updated in
// place, by key. One state request at a time; each request ends after 4 s; answers nobody looks at are forgotten.
// Data older than 5 s is never shown as current.

const STALE_S = 5;
const HUNG_MS = 4000;
const HIDDEN_S = 15;
const FORGET_MS = 30000;
const TURNED_MS = 800; // a key pressed this soon after the case changed was meant for the case before
const HELD_MS = 3000; // the newest case stays this long: a rush can be looked at
const SVG = "http://www.w3.org/2000/svg";

// ---- nodes: h() describes, patch() makes the page so

/** Node of `tag.class`, with attributes if the next argument holds them; null, undefined and false are no children. */
function h(name, ...rest) {
  const [tag, ...classes] = name.split(".");
  const attrs = rest[0]?.constructor === Object && !rest[0].tag ? {...rest.shift()} : {};
  if (classes.length) attrs.class = [...classes, attrs.class ?? ""].join(" ").trim();
  return {tag, attrs, children: rest.flat(9).filter((child) => (child ?? false) !== false)};
}

/** Text whose marks of direction are shown, and turn nothing around. */
const plain = (item) => String(item).replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

function patch(parent, wanted, space = null) {
  const before = new Map();
  for (const node of parent.childNodes) before.set(node.coserveKey, node);
  const nodes = [];
  const taken = new Set();
  wanted.forEach((item, index) => {
    let key = item.tag ? `${item.tag} ${item.attrs.key ?? `#${index}`}` : `#${index}`;
    while (taken.has(key)) key += "'";
    taken.add(key);
    const inner = item.tag === "svg" ? SVG : space;
    const node = before.get(key) ?? made(item, inner, key);
    before.delete(key);
    nodes.push([node, item, inner]);
  });
  for (const left of before.values()) left.remove();
  let place = parent.firstChild;
  for (const [node, item, inner] of nodes) {
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
    if (!item.tag) {
      if (node.data !== plain(item)) node.data = plain(item);
      continue;
    }
    dress(node, item.attrs);
    patch(node, item.children, inner);
    item.attrs.draw?.(node);
  }
}

function made(item, space, key) {
  const node = !item.tag ? document.createTextNode(plain(item))
    : space ? document.createElementNS(space, item.tag) : document.createElement(item.tag);
  node.coserveKey = key;
  if (item.attrs?.value !== undefined) node.value = item.attrs.value; // later the person's
  return node;
}

function dress(node, attrs) {
  const old = node.coserveAttrs ?? {};
  for (const name of Object.keys(old)) if (!(name in attrs)) dressOne(node, name, null);
  for (const [name, value] of Object.entries(attrs)) if (old[name] !== value || name === "style") dressOne(node, name, value);
  node.coserveAttrs = attrs;
}

function dressOne(node, name, value) {
  if (name === "key" || name === "draw" || name === "value" && node.tagName !== "OPTION") return;
  if (name === "label") name = "aria-label";
  if (name.startsWith("on")) node[name] = value;
  else if (name === "style") for (const [key, to] of Object.entries(value ?? {})) node.style.setProperty(key, to);
  else if ((value ?? null) === null || value === false && !name.startsWith("aria")) node.removeAttribute(name);
  else node.setAttribute(name, value === true && !name.startsWith("aria") ? "" : String(value));
}

// ---- what the page knows

const known = {
  state: null, etag: null, version: null, seenAt: null, startedAt: performance.now(), failures: 0, isDenied: false,
  polling: false, askAt: 0, session: null, isSigning: false, isBusy: false, message: null, changedAt: 0,
  held: null, heldAt: -HELD_MS,
};
const chosen = {seq: null, shown: null, turnedAt: -TURNED_MS, isWhy: false, label: "", reason: "", at: 0};
const shows = {boxes: true, map: true};
const answers = new Map(); // path -> the last answer
const byId = (id) => document.getElementById(id);
const now = () => performance.now();

const refused = (status, message) => Object.assign(new Error(message), {status});

async function call(method, path, body, patienceMs = HUNG_MS, headers = {}) {
  const cut = new AbortController();
  const timer = setTimeout(() => cut.abort(), patienceMs);
  try {
    const sent = body === undefined ? {} : {body: JSON.stringify(body)};
    if (sent.body) headers = {...headers, "content-type": "application/json"};
    const response = await fetch(path, {method, headers, cache: "no-store", signal: cut.signal, ...sent});
    if (response.status === 304) return [304, null, response.headers];
    const kind = response.headers.get("content-type") ?? "";
    const told = kind.includes("json") ? await response.json() : await response.text();
    if (response.ok) return [response.status, told || null, response.headers];
    throw refused(response.status, told?.error?.message ?? (String(told).slice(0, 300) || `HTTP ${response.status}`));
  } catch (error) {
    if ("status" in error) throw error;
    throw refused(0, cut.signal.aborted ? `no answer within ${patienceMs / 1000} s` : "the agent does not answer");
  } finally {
    clearTimeout(timer);
  }
}

/** The last answer to a GET, asked again when older than `everyS`: {value, error}. */
function ask(path, everyS = 1e9) {
  let answer = answers.get(path);
  if (!answer) answers.set(path, answer = {value: null, error: null, dueAt: 0, underWay: false});
  answer.usedAt = now();
  if (!answer.underWay && now() >= answer.dueAt && !document.hidden) refresh(path, answer, everyS);
  return answer;
}

async function refresh(path, answer, everyS) {
  const began = now();
  answer.underWay = true;
  try {
    const [, value] = await call("GET", path);
    Object.assign(answer, {value, error: null, isDenied: false, dueAt: known.changedAt > began ? 0 : now() + everyS * 1000});
  } catch (error) {
    Object.assign(answer, {error, dueAt: now() + Math.max(Math.min(everyS, 5), 2) * 1000});
    denied(error, answer);
  } finally {
    answer.underWay = false;
    redraw();
  }
}

async function act(...asked) {
  const [method, path, body, done, patienceMs] = asked;
  if (known.isBusy) return null;
  let again;
  known.isBusy = true;
  redraw();
  try {
    const [, told] = await call(method, path, body, patienceMs);
    tell(done);
    for (const answer of answers.values()) answer.dueAt = 0;
    Object.assign(known, {askAt: 0, changedAt: now()});
    return told ?? {};
  } catch (error) {
    tell(error.message, true);
    denied(error, {});
    if (known.isSigning && body?.token === undefined) again = new Promise((end) => known.again = end);
  } finally {
    known.isBusy = false;
    redraw();
  }
  return await again ? act(...asked) : null;
}

function tell(text, isError = false) {
  known.message = text ? {text, isError, at: now()} : null;
  redraw();
}

/** Ask for a token, once for each question. */
function denied({status}, asked) {
  const isDenied = status === 401 || status === 403;
  known.isSigning ||= isDenied && !asked.isDenied;
  asked.isDenied = isDenied;
}

async function poll() {
  const began = now();
  known.polling = true;
  try {
    const [status, told, head] = await call("GET", "/api/state", undefined, HUNG_MS, known.etag ? {"if-none-match": known.etag} : {});
    known.stayed = new Set(known.state?.cases.map((each) => each.seq)); // others get no picture
    if (status !== 304) Object.assign(known, {state: told.state, etag: head.get("etag")});
    known.version ??= known.state.version;
    if (known.version !== known.state.version) location.reload();
    Object.assign(known, {seenAt: Math.min(began, now() - 1000 * head.get("age")), failures: 0, isDenied: false});
  } catch (error) {
    known.failures += 1;
    denied(error, known);
    if (known.isDenied) { // no longer this person's to see
      known.state = known.etag = null;
      answers.clear();
    }
  } finally {
    known.polling = false;
    known.askAt = began + 1000 * (document.hidden ? HIDDEN_S : Math.min(Math.max(known.failures, 0.9), 2));
    redraw();
  }
}

function tick() {
  for (const [path, answer] of answers) if (now() - answer.usedAt > FORGET_MS && !answer.underWay) answers.delete(path);
  if (known.message && now() - known.message.at > (known.message.isError ? 8000 : 3000)) known.message = null;
  if (!known.polling && now() >= known.askAt) poll();
  if (!document.hidden) redraw();
}

const ageS = () => (now() - (known.seenAt ?? known.startedAt)) / 1000;
const isStale = () => !known.isDenied && ageS() > STALE_S;
const isNamed = () => known.session !== null && known.session.name !== "anonymous";
const theme = () => localStorage.getItem("coserve.theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

// ---- words and numbers

const fixed = (number, digits = 0) => number?.toFixed(digits) ?? "–";
const few = (number) => fixed(number, number && number < 9.95 ? 1 : 0);
const percent = (part) => `${fixed(100 * part, part && Math.abs(part) < 0.0995 ? 1 : 0)} %`;
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : word.endsWith("x") ? "es" : "s"}`;

function seconds(value) {
  if ((value ?? null) === null) return "–";
  if (value < 0.0995) return `${fixed(value * 1000, value < 0.00995 ? 1 : 0)} ms`;
  if (value < 60) return `${fixed(value, value < 9.95 ? 2 : 1)} s`;
  return value < 5400 ? `${fixed(value / 60)} min` : `${fixed(value / 3600, 1)} h`;
}

function bytes(value) {
  const power = Math.min(Math.floor(Math.log2(Math.max(value, 1)) / 10), 4);
  return `${power ? few(value / 1024 ** power) : value} ${"B KiB MiB GiB TiB".split(" ")[power]}`;
}

function clock(iso) {
  if (!iso) return "–";
  const [at, today] = [new Date(iso), new Date()].map((each) => each.toLocaleString("sv")); // 2026-01-31 23:59:59
  return at.slice(0, 10) === today.slice(0, 10) ? at.slice(11) : at;
}

const FINDINGS = {agree: "agreed", false_call: "false call", missed_defect: "missed defect", decided: "decided"};
const MUTE = {"aria-hidden": "true"};
const SHAPES = { // for those who see no red or green
  OK: "M8 1a7 7 0 1 0 .01 0zM4.6 8.3l2.3 2.4 4.5-5",
  NG: "M5 1h6l4 4v6l-4 4H5l-4-4V5zM5.3 5.3l5.4 5.4M10.7 5.3l-5.4 5.4",
  UNKNOWN: "M8 .6L15.4 8 8 15.4.6 8zM6.2 6.4c.2-2.2 3.7-2 3.6.1C9.7 7.7 8 7.7 8 9.2M8 11.4v.4",
};
const mark = (verdict) => h("svg.mark", {viewBox: "0 0 16 16", ...MUTE},
  h("path", {d: SHAPES[verdict] ?? "M8 2a6 6 0 1 0 .01 0z", "stroke-dasharray": SHAPES[verdict] ? null : "3 2.6"}));
const badge = (verdict, size = "") => h("span.badge", {class: `${verdict ?? "OPEN"} ${size}`}, mark(verdict), h("b", verdict ?? "OPEN"));
const bar = (part, kind = "", at = null) => h("span.bar", {class: `${kind} ${at === null ? "" : "at"}`, ...MUTE,
  style: {"--part": `${100 * Math.min(Math.max(part || 0, 0), 1)}%`, "--at": `${100 * at}%`}});

const doubt = (each) => each.unproven && h("small.warn", "unproven");

const expertLink = (id) => id ? h("a.expert", {href: `/expert/${id.split("/").map(encodeURIComponent).join("/")}`}, id) : "–";
const partOf = (result) => [result.component ?? "no component", result.ref].filter(Boolean).join(" ");
const query = (values) => {
  const given = Object.entries(values).filter(([, value]) => (value ?? "") !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
};
const panel = (title, note, ...children) =>
  h("section.panel", {label: title, class: note?.class}, h("h2", title, " ", h("small", note?.class ? note.text : note)), ...children);
const figure = (name, value) => h("div.figure", h("span", name), h("b", value));
const button = (text, onclick, attrs) => h("button", {type: "button", onclick, ...attrs}, text);
const thumbnail = (result) => result.has_image && h("img", {src: `/api/results/${result.seq}/thumbnail`, alt: "", loading: "lazy"});

/** Lines of a panel: a name with its extra, a word, what is told, and a bar filled to `part`. */
const rows = (items, none) => !items.length ? h("p.none", none) : h("ul.rows", items.map((item) =>
  h("li", {key: item.key ?? item.name, class: `${item.bad ? "bad" : ""} ${"part" in item ? "barred" : ""}`, title: item.bad || item.title || item.name},
    item.mark && mark(item.mark), h(item.href ? "a.name" : "span.name", {href: item.href}, item.name, " ", h("small", item.extra)),
    item.word !== undefined && h("b", item.word), item.told && h("span.told", item.told), "part" in item && bar(item.part, item.kind))));

function table(heads, lines, none) {
  if (!lines.length) return h("p.none", none);
  const isNumber = heads.map((head) => head.startsWith("#") ? "number" : "");
  return h("div.scroll", h("table", h("thead", h("tr", heads.map((head, index) => h("th", {class: isNumber[index]}, head.replace("#", ""))))),
    h("tbody", lines.map(({key, attrs, cells}) => h("tr", {key, ...attrs}, cells.map((cell, index) => h("td", {class: isNumber[index]}, cell)))))));
}

/** Shown while an answer is not there, or null. */
const missing = ({value, error}) => value ? null
  : h("p.none", {class: error ? "bad" : "", role: error ? "alert" : "status"}, error?.message ?? "asking the agent…");

function header() {
  const state = known.state;
  const judging = isStale() ? "NO ANSWER" : state?.judging.state ?? (known.isDenied ? "SIGN IN" : "…");
  const reason = isStale() ? "" : state?.phase ?? state?.judging.reason ?? "";
  const count = state?.shift.verdicts.UNKNOWN;
  return h("header", {class: isStale() ? "stale" : ""},
    h("div.top", h("a.line", {href: "/"}, state?.line ?? "CoServe"),
      h("div.judging", {class: judging.replace(" ", "-"), role: "status"}, h("span.dot", MUTE), h("b", judging), h("small", {title: reason}, reason)),
      takt(state?.shift), h("a.figure", {href: "/review?verdict=UNKNOWN&reviewed=false", class: count ? "warn" : ""}, h("span", "UNKNOWN"), h("b", fixed(count))), age()),
    h("div.second", alarms(state?.alarms ?? []), navigation()));
}

function takt(shift) {
  const [is, target] = [shift?.takt_s, shift?.takt_target_s];
  const kind = is && target ? is > target ? "bad" : is > 0.97 * target ? "warn" : "good" : "";
  const word = {bad: "too slow", warn: "just holds", good: "holds"}[kind];
  const title = shift?.takts.map((each) => `${each.board_type}: ${few(each.takt_s)}/${fixed(each.takt_target_s)} s`).join("\n");
  return h("div.figure.takt", {class: kind, title}, h("span", "takt ", h("i", word)), h("b", few(is), h("small", target ? `/${fixed(target)} s` : " s")));
}

function age() {
  const who = known.session;
  const text = isStale() ? `no answer for ${Math.floor(ageS())} s: reconnecting` : !known.state ? "no data yet" : `data ${Math.max(1, Math.round(ageS()))} s old`;
  return h("div.age", h("span.data", {role: "timer", "aria-live": isStale() ? "assertive" : "off"}, text),
    button(isNamed() ? who.name : "sign in", () => sign(true), {class: "quiet", label: isNamed() ? `signed in as ${who.name}, role ${who.role}` : "sign in"}));
}

function alarms(all) {
  const spoken = h("div.spoken", {role: "alert"}, all.map((alarm) => `alarm: ${alarm.message}. `));
  if (!all.length) return [spoken, h("div.alarms.calm", mark("OK"), "no alarms")];
  return [spoken, h("details.alarms", h("summary", h("b", plural(all.length, "alarm")), h("span", all[0].message)),
    h("ul", all.map((alarm) => h("li", {key: alarm.name}, h("b", alarm.name), h("span", alarm.message), h("time", `since ${clock(alarm.raised_at)}`)))))];
}

function navigation() {
  const pages = [["/", "Station"], ["/review", "Review"], ["/engine", "Engine"], ["/texts", "Texts"], ["/line", "Line"]];
  return h("nav", {label: "pages"}, pages.filter(([path]) => path !== "/texts" || known.state?.texts).map(([path, name]) =>
    h("a", {key: path, href: path, "aria-current": location.pathname === path ? "page" : null}, name)),
  button("◐", () => {
    localStorage.setItem("coserve.theme", theme() === "dark" ? "light" : "dark");
    redraw();
  }, {class: "quiet", label: "dark or light"}));
}

function station() {
  const state = known.state;
  if (!state) return h("p.none", known.isDenied ? "A token is needed to see this." : "asking the agent…");
  const cases = held(state.cases);
  return h("div.station", lastBoards(state), caseView(turned(cases, known.held), cases),
    h("div.side", sources(state), executors(state), memories(state.memories), pareto(state.shift.pareto)));
}

function lastBoards({boards, shift}) {
  const {OK = 0, NG = 0, UNKNOWN = 0} = shift.boards;
  const told = `since ${clock(shift.since).slice(-8, -3)}: ${OK} OK · ${NG} NG · ${UNKNOWN} UNKNOWN · ` +
    `${plural(shift.reviews.false_call ?? 0, "false call")}, ${plural(shift.reviews.missed_defect ?? 0, "missed defect")}`;
  return panel("Last boards", {class: "boards", text: told}, !boards.length ? h("p.none", "no board yet") : h("ol.tiles", boards.map((board) => {
    const [href, word] = board.number === null ? [null, "OPEN"] : [`/board/${board.number}`, board.verdict];
    return h("li", {key: board.number ?? `open ${board.board_type} ${board.serial}`}, h(href ? "a.tile" : "div.tile", {class: word, href,
      title: `${board.serial} · ${board.board_type} · ${word}${board.missing ? `, ${board.missing} missing` : ""}`},
    h("b", word), h("span", mark(board.verdict), board.serial.slice(-7).replace(/^\W+/, ""))));
  })));
}

function sources(state) {
  const told = (source) => [source.per_s && `${few(source.per_s)}/s`, source.waiting && `${source.waiting} waiting`, source.dropped && `${source.dropped} dropped`];
  return panel("Sources", state.texts && `texts ${few(state.texts.tokens_per_s)} tokens/s`, rows([
    ...state.sources.map((each) => ({key: `${each.kind} ${each.name}`, mark: each.alarm ? "NG" : "OK", name: each.name.split("/").slice(-2).join("/"), extra: each.kind, title: each.name, bad: each.alarm,
      word: each.state, told: told(each).filter(Boolean).join(" · ")})),
    ...state.receivers.map((each) => ({key: `receiver ${each.name}`, mark: each.alarm ? "NG" : "OK", name: each.name, extra: "receiver", bad: each.alarm,
      word: each.alarm ? "FAILS" : "TOLD", told: `${each.waiting} behind`}))], "none: images come over the API"));
}

const executorName = (each) => `${each.processor} ${each.executor}`;

function executors({loads, executors: all}) {
  return panel("Executors", `${few(loads.switches_per_min)} switches/min · p99 ${seconds(loads.wait_p99_s)}`, rows(all.map((each) => ({name: executorName(each), extra: each.running ?? "idle",
    told: `${each.requests} queued · ${seconds(each.wait_s)}`, word: percent(each.busy), part: each.busy})), "none"));
}

const memories = (all) => panel("Memory", "held of budget", rows(all.map((each) => ({name: each.name, extra: plural(each.experts.length ?? each.experts, "expert"),
  told: `${bytes(each.used_bytes)} of ${bytes(each.capacity_bytes)}${each.lease_bytes ? ` · texts ${bytes(each.lease_bytes)}` : ""}`,
  part: each.used_bytes / each.capacity_bytes, kind: each.used_bytes > each.capacity_bytes ? "bad" : ""})), "none"));

const pareto = (bars) => panel("Defects of the shift", null, rows(bars.map((each) => ({key: `${each.component} ${each.label}`, name: each.component,
  extra: each.label ?? "UNKNOWN", href: `/review${query({component: each.component, label: each.label})}`, word: `${each.images}`,
  part: each.images / bars[0].images, kind: "bad"})), "none"));

// ---- a case: the image, the chain of experts, the second verdict

/** `cases`, with the held one: the chosen case, or one that is the newest for HELD_MS. */
function held(cases) {
  const seq = chosen.seq ?? known.held?.seq;
  known.held = cases.find((each) => each.seq === seq) ?? known.held;
  if (known.held?.seq !== chosen.seq && now() - known.heldAt >= HELD_MS && cases[0]?.seq !== known.held?.seq) Object.assign(known, {held: cases[0], heldAt: now()});
  return !known.held || cases.includes(known.held) ? cases : [...cases.slice(0, -1), known.held];
}

/** The chosen case, else the usual one; notes when it is another one. */
function turned(cases, usual = cases[0]) {
  const at = cases.findIndex((each) => each.seq === chosen.seq);
  const found = at >= 0 ? cases[at] : usual;
  if (at >= 0) chosen.at = at;
  if (found?.seq !== chosen.shown) turn(chosen.seq, found?.seq ?? null, chosen.shown === null ? -TURNED_MS : now());
  return found;
}

const turn = (seq, shown, turnedAt) => Object.assign(chosen, {seq, shown, turnedAt, isWhy: false, label: "", reason: ""});
const pin = () => chosen.seq = chosen.shown;

function choose(seq) {
  if (seq === null) known.heldAt = -HELD_MS;
  turn(seq, seq, -TURNED_MS);
  redraw();
}

function step(by) {
  const cases = {"/": held(known.state?.cases ?? []), "/review": answers.get(reviewPath())?.value?.results}[location.pathname] ?? answers.get(boardPath())?.value?.parts ?? [];
  const next = cases[cases.findIndex((each) => each.seq === chosen.shown) + by];
  if (next) choose(next.seq);
}

function caseView(result, cases, title = "Newest NG and UNKNOWN") {
  if (!result) return panel(title, {class: "case"}, h("p.none.calm", mark("OK"), "no NG and no UNKNOWN to look at"));
  const answer = ask(`/api/results/${result.seq}`, 20);
  const at = cases.indexOf(result);
  return panel(title, {class: `case ${result.verdict}`},
    h("div.caption", badge(result.verdict, "large"),
      h("div.what", h("b", result.label ?? "no label", h("small", result.score === null ? "" : fixed(result.score, 3)), " ", doubt(result)),
        h("span", `${partOf(result)} · `, boardLink(result), ` · ${clock(result.finished_at)}`)),
      h("div.turn", location.pathname === "/" && chosen.seq !== null && at > 0 && button(`${at} newer`, () => choose(null), {class: "quiet"}),
        button("‹", () => step(-1), {label: "newer case", disabled: at <= 0}), h("span", `${at + 1}/${cases.length}`),
        button("›", () => step(1), {label: "older case", disabled: at >= cases.length - 1}))),
    h("div.body", picture(result, answer.value), chosen.isWhy ? why(result.seq) : chain(result, answer)),
    h("div.strip", {role: "group", label: "cases"}, cases.slice(Math.max(0, at - 11), Math.max(12, at + 1)).map((each) => h("button", {key: each.seq, type: "button",
      class: `${each.verdict} ${each.review ? "reviewed" : ""}`, "aria-current": each === result ? "true" : null, onclick: () => choose(each.seq),
      label: `${each.verdict} ${partOf(each)} ${each.label ?? ""}${each.review ? ", reviewed" : ""}`}, (location.pathname !== "/" || known.stayed.has(each.seq)) && thumbnail(each), mark(each.verdict)))),
    secondVerdict(result, answer.value));
}

/** Link to the last run of a result's board; while that is open, to its results. */
function boardLink({board, board_type, image}) {
  if (board === null) return image;
  const found = ask(`/api/boards${query({serial: board, board_type, limit: 1})}`, 20).value?.boards[0];
  return h("a", {href: found ? `/board/${found.number}` : `/review${query({board})}`}, `board ${board}`);
}

function picture(result, detail) {
  if (!result.has_image) return h("div.picture.none", h("p", "image not kept"), h("small", result.image));
  const source = `/api/results/${result.seq}/image?width=1280`;
  const [height, width] = detail?.size ?? [0, 0];
  const steps = detail?.steps ?? [];
  const mapAt = steps.findLastIndex((each) => each.anomaly?.has_map);
  const boxes = steps.flatMap((each) => each.boxes);
  return h("div.picture", h("img", {key: source, src: source, alt: `${partOf(result)}: ${result.verdict} ${result.label ?? ""}`}),
    width > 0 && h("svg.over", {key: `over ${result.seq}`, viewBox: `0 0 ${width} ${height}`, ...MUTE},
      shows.map && mapAt >= 0 && h("image.map", {href: `/api/results/${result.seq}/maps/${mapAt}`, width, height, preserveAspectRatio: "none"}),
      shows.boxes && boxes.map((box) => boxMark(box, Math.max(width, height) / 32))),
    h("div.toggles", {key: "toggles"}, mapAt >= 0 && toggle("heat map", "map"), boxes.length > 0 && toggle(plural(boxes.length, "box"), "boxes")));
}

const boxMark = (box, size) => h("g.box", h("rect", {x: box.left, y: box.top, width: Math.max(box.right - box.left, 1), height: Math.max(box.bottom - box.top, 1)}),
  h("text", {x: box.left, y: box.top > size * 1.2 ? box.top - size / 3 : box.top + size, "font-size": size}, `${box.label} ${fixed(box.score, 2)}`));

const toggle = (name, key) => button(name, () => {
  shows[key] = !shows[key];
  redraw();
}, {key, "aria-pressed": shows[key]});

const chain = (result, answer) => h("div.chain", {key: "chain", tabindex: 0, label: "chain of experts"}, result.reason && h("p.reason", result.reason),
  missing(answer) ?? h("ol", answer.value.steps.map((each, index, all) => h("li", {class: index === all.length - 1 ? result.verdict : "passed"},
    expertLink(each.expert), h("b", each.label, " ", doubt(each)), h("span", fixed(each.score, 3)), h("div.measured", measured(each))))));

function measured({anomaly, outputs, score}) {
  if (anomaly) return [`anomaly ${fixed(anomaly.score, 3)}, threshold ${fixed(anomaly.threshold, 3)}`,
    bar(anomaly.score / (2 * anomaly.threshold), anomaly.score >= anomaly.threshold ? "bad" : "good", 0.5)];
  return outputs.length ? outputs.map((each) => h("div", `${each.label} ${fixed(each.score, 2)}, threshold ${fixed(each.threshold, 2)}`,
    bar(each.score, each.holds ? "bad" : "good", each.threshold))) : bar(score);
}

function why(subject) {
  const answer = ask(`/api/explain${query({subject})}`, 20);
  return h("div.chain", {key: "why", tabindex: 0, label: "why"}, missing(answer) ??
    h("ul.sentences", answer.value.sentences.map((sentence) => h("li", sentence))));
}

const CHOICES = { // machine's verdict -> key, word, the person's verdict
  NG: [["A", "Agree", "NG"], ["F", "False call", "OK"]],
  OK: [["A", "Agree", "OK"], ["F", "Missed defect", "NG"]],
  UNKNOWN: [["O", "It is OK", "OK"], ["N", "It is NG", "NG"]],
};

function secondVerdict(result, detail) {
  const review = detail ? detail.review : result.review;
  const field = (name) => h("input", {key: `${name} ${result.seq}`, list: name === "label" ? "labels" : null, placeholder: name, label: name, maxlength: 200, onfocus: pin,
    oninput: (event) => {
      pin();
      chosen[name] = event.target.value;
    }});
  const labels = new Set([...known.state?.shift.pareto.map((each) => each.label) ?? [], ...detail?.steps.map((each) => each.label) ?? []].filter(Boolean));
  return h("div", {key: "verdict"}, review ? h("div.given", {key: "given", class: review.verdict, role: "status"}, mark(review.verdict),
    h("span", h("b", FINDINGS[review.finding]), ` by ${review.who} at ${clock(review.at)} `, [review.label, review.reason].filter(Boolean).join(" · ")),
    button("Undo", () => act("DELETE", `/api/reviews/${review.number}?file=${result.file}`, undefined, "undone"), {class: "quiet", disabled: known.isBusy}))
    : h("div.fields", {key: "fields"}, field("label"), field("reason"), h("datalist", {id: "labels"}, [...labels].map((label) => h("option", {value: label})))),
  h("div.choices", CHOICES[result.verdict].map(([key, word, verdict]) => button([h("kbd", MUTE, key), word, mark(verdict)], () => judge(result, verdict),
    {key, class: `choice ${verdict}`, disabled: known.isBusy, "aria-keyshortcuts": key, "aria-pressed": review?.verdict === verdict})),
  button([h("kbd", MUTE, "W"), "Why?"], () => {
    pin();
    chosen.isWhy = !chosen.isWhy;
    redraw();
  }, {key: "why", class: "choice", "aria-keyshortcuts": "W", "aria-pressed": chosen.isWhy})));
}

async function judge(result, verdict) {
  if (now() - chosen.turnedAt < TURNED_MS) return tell("The case has just changed: look, then press again.", true);
  pin();
  const given = await act("POST", "/api/reviews", {result: result.seq, file: result.file, verdict, label: chosen.label.trim() || null, reason: chosen.reason.trim() || null}, "kept");
  if (given) tell(`${FINDINGS[given.finding]}: kept beside the machine's verdict`);
}

const boardPath = () => `/api/boards/${location.pathname.split("/")[2]}`;

function board() {
  const answer = ask(boardPath(), 5);
  const value = answer.value;
  if (!value) return missing(answer);
  const part = turned(value.parts, value.parts.find((each) => each.verdict !== "OK") ?? value.parts[0]);
  return h("div.two", h("div.column",
    h("div.caption", badge(value.verdict, "large"), h("div.what", h("h1", value.serial),
      h("span", `${value.board_type} · run ${value.number} · ${clock(value.opened_at)} – ${clock(value.closed_at)} · takt ${few(value.takt_s)} s`))),
    panel("Parts", `${value.is_cut ? "latest " : ""}${value.parts.length} judged${value.reason ? `; ${value.reason}` : ""}`, boardPicture(value, part)),
    panel("Timeline", "from arrival to verdict", boardTimeline(value)), panel("Rework", null, rework(value))),
  caseView(part, value.parts, "Part"));
}

function boardPicture({size, frame, serial, parts}, part) {
  const boxed = parts.filter((each) => each.box);
  if (!size || frame === null || !boxed.length) return h("ol.grid", parts.map((each) => h("li", {key: each.seq}, h("button", {type: "button", class: each.verdict,
    "aria-pressed": each === part, onclick: () => choose(each.seq)}, thumbnail(each), h("span", mark(each.verdict), h("b", each.ref ?? each.component)), h("small", each.label ?? each.verdict, " ", doubt(each))))));
  return h("div.frame", h("img", {src: `/api/results/${frame}/frame?width=1280`, alt: `picture of board ${serial}`}), h("svg.over", {viewBox: `0 0 ${size[1]} ${size[0]}`}, boxed.map((each) => {
    const [left, top, right, bottom] = each.box;
    return h("g.part", {key: each.seq, class: `${each.verdict} ${each === part ? "chosen" : ""}`, onclick: () => choose(each.seq)}, h("title", `${partOf(each)}: ${each.verdict} ${each.label ?? ""}`),
      h("rect", {x: left, y: top, width: Math.max(right - left, 1), height: Math.max(bottom - top, 1)}),
      each.verdict !== "OK" && h("text", {x: left, y: Math.max(top - size[0] / 90, size[0] / 30), "font-size": size[0] / 32}, each.ref ?? each.component));
  })));
}

function boardTimeline({parts, opened_at}) {
  const begin = Date.parse(opened_at);
  const span = Math.max(1, ...parts.map((each) => Date.parse(each.finished_at) - begin));
  const share = (iso) => `${Math.min(Math.max((Date.parse(iso) - begin) / span, 0), 1) * 100}%`;
  return h("ol.spans", parts.slice(0, 60).map((each) => h("li", {key: each.seq}, h("span", partOf(each)),
    h("span.span", {class: each.verdict, style: {"--from": share(each.arrived_at), "--to": share(each.finished_at)}}), h("small", seconds(each.seconds)))));
}

const rework = ({serial, board_type, reworks}) => h("div.rework", reworks.map((each) => h("p", `reworked by ${each.who} at ${clock(each.at)}${each.reason ? `: ${each.reason}` : ""}`)),
  h("input", {id: "rework", placeholder: "what was reworked", label: "what was reworked", maxlength: 1000}),
  button("Open a new run of this serial", () => act("POST", "/api/boards/rework", {serial, board_type, reason: byId("rework").value.trim() || null},
    `The next image of ${serial} opens a new run.`), {disabled: known.isBusy, class: "choice"}));

function expert() {
  const id = location.pathname.split("/").slice(2).map(decodeURIComponent).join("/");
  const answer = ask(`/api/expert${query({id})}`, 5);
  const value = answer.value;
  if (!value) return missing(answer);
  const most = Math.max(value.usage_profiled, value.usage_seen, 1e-9);
  return h("div.page", h("div.caption", h("div.what", h("h1", value.id), h("span", [value.task, value.architecture, value.components.join(", ")].filter(Boolean).join(" · "))),
    h("span", {class: value.standing ? "bad" : "good"}, value.standing ?? "takes requests"), value.unproven && h("span.warn", "unproven: ", value.unproven)),
  h("div.figures", figure("images", fixed(value.seen?.images)), figure("p50", seconds(value.seen?.p50_s)), figure("p99", seconds(value.seen?.p99_s)),
    figure("loads", value.loads), figure("evictions", value.evictions), figure("in memory", value.memories.join(", ") || "no"),
    h("a.figure", {href: `/review${query({expert: value.id, finding: "false_call"})}`, class: value.false_calls ? "warn" : ""}, h("span", "false calls"), h("b", `${value.false_calls} of ${value.reviewed_ng}`))),
  h("div.cards", panel("Share of runs", value.usage_seen ? `drift ${value.drift > 0 ? "+" : ""}${percent(value.drift)}` : "not seen yet", rows([["profiled", value.usage_profiled], ["seen", value.usage_seen]].map(([name, share]) =>
    ({name, word: percent(share), part: share / most})))),
  panel("Second verdicts", null, rows(Object.entries(FINDINGS).map(([name, word]) => ({name: word, word: `${value.reviews[name] ?? 0}`})))),
  panel("Labels", null, h("p.labels", value.labels.map((label) => h("span", label))))),
  panel("Latency", "as profiled", table(["processor", "#one image", "#batch", "#its time", "load"], Object.entries(value.latency).map(([processor, row]) => ({key: processor,
    cells: [processor, seconds(row.one_s), row.batch, seconds(row.batch_s), Object.entries(row.load_s).map(([from, s]) => `${from} ${seconds(s)}`).join(", ")]})), "not profiled")),
  panel("Why", "it is in memory or not", why(value.id)),
  panel("Evictions", "newest first", table(["at", "memory", "stage", "why", "for", "candidates"], value.evictions_recent.map((each) => ({
    cells: [clock(each.at), each.memory, each.stage, each.why, expertLink(each.for), (each.candidates ?? []).join(", ")]})), "not evicted lately")));
}

function engine() {
  const answer = ask("/api/engine?last=60", 1);
  const experts = ask("/api/experts", 5);
  const value = answer.value;
  if (!value) return missing(answer);
  const lanes = [...value.executors.map((each) => ({name: executorName(each), spans: each.spans, of: (count) => plural(count, "image")})),
    ...value.links.map((each) => ({name: each.name, spans: each.spans, of: bytes}))];
  const busy = ({spans}) => percent(spans.reduce((sum, [begin, end]) => sum + Math.min(end, 0) - Math.max(begin, -value.span_s), 0) / value.span_s);
  return h("div.page", panel(`Last ${fixed(value.span_s)} s`, "batches of executors, loads over links", h("ul.lanes", lanes.map((lane) => h("li", {key: lane.name}, h("span", lane.name),
    h("canvas", {role: "img", label: `${lane.name}: ${plural(lane.spans.length, "span")}, busy ${busy(lane)}`, draw: (canvas) => paint(canvas, lane.spans, value.span_s),
      onpointermove: (event) => point(event, lane, value.span_s), onpointerleave: () => tell(null)}), h("b", busy(lane))))),
  h("div.axis", [1, 0.75, 0.5, 0.25, 0].map((ago) => h("span", ago ? `-${fixed(value.span_s * ago)} s` : "now")))),
  h("div.cards", memories(value.memories), known.state && executors(known.state)),
  panel("Experts", null, missing(experts) ?? table(["expert", "components", "in memory", "#profiled", "#seen", "#loads", "#evictions", "#false calls", "standing"],
    experts.value.experts.map((each) => ({key: each.id, attrs: {class: each.standing ? "bad" : ""}, cells: [expertLink(each.id), each.components.join(", "), each.memories.join(", "),
      percent(each.usage_profiled), percent(each.usage_seen), each.loads, each.evictions, `${each.false_calls} of ${each.reviewed_ng}`, each.standing ?? (each.unproven ? "unproven" : "takes requests")]})), "no expert")));
}

function paint(canvas, spans, spanS) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight].map((side) => Math.round(side * devicePixelRatio));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, width, height);
  for (const [begin, end, name] of spans) {
    const hue = [...name].reduce((sum, letter) => (sum * 31 + letter.codePointAt(0)) % 3607, 7) * 137 % 360;
    pen.fillStyle = `hsl(${hue} 55% ${theme() === "dark" ? 60 : 45}%)`;
    pen.fillRect((1 + begin / spanS) * width, 0, Math.max((end - begin) / spanS * width, 1), height);
  }
}

function point(event, lane, spanS) {
  const at = (event.offsetX / event.target.clientWidth - 1) * spanS;
  const found = lane.spans.findLast(([begin, end]) => begin - spanS / 400 <= at && at <= end + spanS / 400);
  tell(found ? `${lane.name}: ${found[2]}, ${lane.of(found[3])}, ${seconds(found[1] - found[0])}, ${seconds(-found[1])} ago` : null);
}

function texts() {
  const answer = ask("/api/texts", 1);
  const value = answer.value;
  return missing(answer) ?? h("div.page", h("div.figures", figure("tokens/s", few(value.tokens_per_s)), figure("first token", seconds(value.first_token_s)), figure("under way", value.under_way.length)),
    panel("Under way", null, table(["#number", "model", "expert", "#waited", "#tokens read", "#written"], value.under_way.map((each) => ({key: each.number,
      cells: [each.number, each.model, expertLink(each.expert), seconds(each.waited_s), each.read_tokens, each.written_tokens]})), "no text is under way")),
    panel("Models", null, table(["model", "experts", "#context", "state"], value.models.map((each) => ({key: each.name,
      cells: [each.name, each.experts.join(", "), fixed(each.context_tokens), each.is_ready ? "ready" : each.reason ?? "not ready"]})), "no language model")));
}

const FILTERS = [["verdict", ["NG", "UNKNOWN", "OK"]], ["reviewed", ["true", "false"]], ["finding", Object.keys(FINDINGS)], ["component"], ["expert"], ["label"], ["board"], ["source"]];
const WORDS = {...FINDINGS, true: "yes", false: "no", "": "all"};
const filters = () => Object.fromEntries(new URLSearchParams(location.search));
const reviewPath = () => `/api/results${query({...filters(), limit: 50})}`;

function review() {
  const given = filters();
  const answer = ask(reviewPath(), 3);
  const results = answer.value?.results ?? [];
  const shown = turned(results, results[Math.min(chosen.at, results.length - 1)]);
  const next = answer.value?.next;
  const filter = (name) => ({key: `${name} ${given[name]}`, label: name, onchange: (event) => go(`/review${query({...given, before: null, [name]: event.target.value.trim()})}`)});
  return h("div.two", h("div.column", h("form.filters", {role: "search", onsubmit: (event) => event.preventDefault()}, FILTERS.map(([name, values]) => h("label", h("span", name),
    values ? h("select", filter(name), ["", ...values].map((value) => h("option", {value, selected: (given[name] ?? "") === value}, WORDS[value] ?? value)))
      : h("input", {...filter(name), value: given[name] ?? ""})))),
  missing(answer) ?? table(["verdict", "part", "label", "second verdict"], results.map((each) => ({key: each.seq, attrs: {"aria-selected": each === shown, onclick: () => choose(each.seq)},
    cells: [[badge(each.verdict), h("small", clock(each.finished_at)), " ", doubt(each)], [partOf(each), h("small", each.board ?? each.image)], [each.label ?? each.reason, h("small", fixed(each.score, 3))],
      each.review ? [FINDINGS[each.review.finding], h("small", each.review.who)] : "–"]})), "no such result"),
  h("div.choices", given.before && h("a.choice", {href: `/review${query({...given, before: null})}`}, "Newest"), next && h("a.choice", {href: `/review${query({...given, before: next})}`}, "Older"))),
  caseView(shown, results, "Result"));
}

const line = {checked: null, reloaded: null};

function lineFile() {
  const answer = ask("/api/line", 30);
  const audit = ask("/api/audit?limit=50", 10);
  const value = answer.value;
  if (!value) return missing(answer);
  const keep = (name, ...request) => button({checked: "Check this text", reloaded: "Reload the file"}[name], async () => {
    line[name] = await act("POST", ...request.map((each) => each?.call ? each() : each));
    redraw();
  }, {key: name, class: "choice", disabled: known.isBusy});
  return h("div.page", h("p", {class: value.is_served ? "" : "warn"}, h("b", value.file), value.is_served ? " is being served." : " has changed since the agent read it: reload it.",
    " Edit the file on the box; a change made here is only checked."),
  h("textarea", {id: "text", key: value.sha256, value: value.text, spellcheck: "false", label: "text of the line file", wrap: "off"}),
  h("div.choices", keep("checked", "/api/line/check", () => ({text: byId("text").value}), "checked"), keep("reloaded", "/api/reload", undefined, "asked", 60000)),
  line.checked && panel("Check", null, line.checked.problems.length ? h("ul.problems", line.checked.problems.map(problem)) : h("p.good", "This text is a valid line file.")),
  line.reloaded && panel("Reload", null, h("p", {class: line.reloaded.is_applied ? "good" : "bad"}, line.reloaded.is_applied ? "The line serves this file." : "The line serves what it did before."),
    ["problems", "added", "replaced", "removed", "needs_restart"].map((name) => line.reloaded[name].length > 0 && h("p", h("b", `${name.replace("_", " a ")}: `), line.reloaded[name].join(", ")))),
  panel("Who changed what", "newest first", missing(audit) ?? table(["at", "who", "action", "subject", "outcome"], audit.value.entries.map((each) => ({key: each.number,
    cells: [clock(each.at), each.who, each.action, each.subject, each.outcome]})), "nothing yet")));
}

const problem = (each) => h("li", each.line !== null && button(`line ${each.line}`, () => {
  const area = byId("text");
  const at = area.value.split("\n").slice(0, each.line - 1).reduce((sum, before) => sum + before.length + 1, (each.column ?? 1) - 1);
  area.focus();
  area.setSelectionRange(at, at);
}), h("b", each.key), h("span", each.message));

function sign(isSigning) {
  known.again?.(false);
  Object.assign(known, {isSigning, again: null});
  redraw();
}

const signIn = () => h("dialog", {onclose: () => sign(false), label: "sign in", draw: (node) => {
  if (known.isSigning !== node.open) node[known.isSigning ? "showModal" : "close"]();
}}, h("form", {onsubmit: submitToken}, h("h1", isNamed() ? `Signed in as ${known.session.name}` : "Sign in"),
  h("p", known.session && `Role: ${known.session.role}. `, "A token says what you may do, and names you beside your verdicts."),
  h("input", {id: "token", type: "password", placeholder: "token", label: "token", autocomplete: "off", maxlength: 4096}),
  h("p.bad", {role: "alert"}, known.message?.isError && known.message.text),
  h("div.choices", h("button.choice", "Sign in"), button("Sign out", () => session("DELETE", undefined, "signed out"), {class: "choice", disabled: !isNamed()}),
    button("Close", () => sign(false), {class: "choice"}))));

function submitToken(event) {
  event.preventDefault();
  const input = byId("token");
  session("POST", {token: input.value.trim()}, "signed in");
  input.value = "";
}

async function session(method, body, done) {
  if (!await act(method, "/api/session", body, done)) return;
  const {again} = known;
  known.again = null;
  sign(false);
  await whoAmI();
  again?.(body);
}

async function whoAmI() {
  try {
    [, known.session] = await call("GET", "/api/session");
  } catch {
    known.session = null; // the state tells whether the agent answers
  }
  redraw();
}

// ---- pages, keys, time

const PAGES = [[/^\/board\//, board, "Board"], [/^\/expert\//, expert, "Expert"], [/^\/engine$/, engine, "Engine"], [/^\/texts$/, texts, "Texts"],
  [/^\/review$/, review, "Review"], [/^\/line$/, lineFile, "Line file"], [/^/, station, null]];
let isDue = false;

function redraw() {
  if (isDue) return;
  isDue = true;
  queueMicrotask(() => {
    isDue = false;
    const [, view, name] = PAGES.find(([path]) => path.test(location.pathname));
    document.documentElement.dataset.theme = theme();
    document.title = [isStale() ? "NO ANSWER" : known.state?.judging.state, name, known.state?.line].filter(Boolean).join(" · ");
    try {
      patch(byId("station"), [header(), h("main", {key: location.pathname, tabindex: -1}, view()), signIn(),
        h("output.message", {class: known.message?.isError ? "bad" : "", hidden: !known.message || known.isSigning}, known.message?.text)]);
    } catch (error) { // what is shown would stay, as if it were current
      patch(byId("station"), [h("header.stale", {key: "failed"}, h("div.top", h("b", `This page failed: ${error.message}`)))]);
      throw error;
    }
  });
}

function go(url) {
  if (new URL(url, location).pathname !== location.pathname) turn(null, null, -TURNED_MS);
  history.pushState(null, "", url);
  scrollTo(0, 0);
  redraw();
}

document.addEventListener("click", (event) => {
  const to = event.target.closest("a[href]");
  if (!to || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(to.href);
});

document.addEventListener("keydown", (event) => {
  if (event.target.matches?.("input, textarea, select") || known.isSigning || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (by) step(by);
  else if (event.key === "Escape") choose(null);
  else [...document.querySelectorAll("[aria-keyshortcuts]")].find((node) => node.getAttribute("aria-keyshortcuts") === event.key.toUpperCase())?.click();
});

addEventListener("popstate", redraw);
document.addEventListener("visibilitychange", () => {
  known.askAt = 0;
  if (!document.hidden && !known.polling) poll();
});

setInterval(tick, 1000);
whoAmI();
tick();
