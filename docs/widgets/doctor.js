// A log read in the page: rlhf_notes/doctor.py as it stands, in Pyodide's core, which a click fetches.

const READ = `
import json, os
from pathlib import Path
os.makedirs("/logs", exist_ok=True); os.chdir("/logs")
import doctor
def read(name, content):
    Path(name).write_bytes(content.to_py())
    try:
        rows = doctor.read_log(name)
    except ValueError as e:
        return json.dumps(dict(error=f"rlhf-notes: {e}"))
    finally:
        Path(name).unlink()
    found, dials = doctor.examine(rows), doctor.series(rows)
    curves = {x.column: [x.steps, [v if abs(v) < 1e300 else None for v in map(x.turn, x.values)]] for x in dials.values()}
    findings = [dict(fault=x.fault, column=x.column, step=x.step, why=x.why, page=doctor.lesson(x.page), text=str(x)) for x in found]
    return json.dumps(dict(text=doctor.report(rows, found), findings=findings, curves=curves))
`;

// What runs beside the page: the interpreter, once, and then one log after the other.
async function pythonWorker() {
  const inflate = async (text) => new Uint8Array(await new Response(new Blob([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
  let read;
  onmessage = async ({data}) => {
    try {
      if (data.parts) {
        const parts = {}, address = (name, type) => URL.createObjectURL(new Blob([parts[name]], {type}));
        for (const [name, text] of Object.entries(data.parts)) parts[name] = await inflate(text);
        self.importScripts = () => { throw new Error("none"); };       // a page from a file has classic workers alone, and Pyodide asks for a module's
        const {loadPyodide} = await import(address("pyodide.mjs", "text/javascript"));
        const createPyodideModule = (await import(address("pyodide.asm.mjs", "text/javascript"))).default;
        self.fetch = async (url) => new Response(parts[String(url).replace(/.*\//, "")], {headers: {"Content-Type": "application/wasm"}});
        const {info} = JSON.parse(new TextDecoder().decode(parts["pyodide-lock.json"]));
        const python = await loadPyodide({indexURL: "memory:/", createPyodideModule, lockFileContents: {info, packages: {}}, fullStdLib: false});
        python.FS.writeFile("/home/pyodide/doctor.py", data.source);
        python.runPython(`import sys; sys.path.insert(0, "/home/pyodide")\n${data.code}`);
        read = python.globals.get("read");
        postMessage({ready: true});
      } else {
        const found = read(data.name, data.content);
        postMessage(JSON.parse(found));
      }
    } catch (e) { postMessage({failed: String(e)}); }
  };
}

// A pasted text has the name by which the command would know its kind.
function nameOf(text) {
  try { return JSON.parse(text).log_history ? "trainer_state.json" : "pasted.txt"; } catch { return "pasted.txt"; }
}
const EVENTS = "Event files of TensorBoard are read by the command alone: rlhf-notes doctor FILE";
const WITHOUT = "This copy of the site was built without Python for the page. The command reads the same logs: rlhf-notes doctor FILE";

widget("doctor", (box) => {
  const said = make("p", {class: "case", "aria-live": "polite"}), found = make("div", {class: "findings"});
  const pasted = make("textarea", {rows: 4, spellcheck: "false", "aria-label": "or paste a log", placeholder: "or paste it here: CSV, JSON, JSON lines, verl's console"});
  const file = make("input", {type: "file", "aria-label": "a log", onchange: () => { if (file.files[0]) readFile(file.files[0]); }});
  let python;

  // The interpreter, started by the first log that is given.
  function start() {
    return python ??= new Promise((resolve, reject) => {
      const script = make("script", {src: new URL("pyodide-pack.js", SCRIPTS).href});
      script.onerror = () => reject(WITHOUT);
      script.onload = () => {
        if (typeof PYODIDE === "undefined") { reject(WITHOUT); return; }
        const worker = new Worker(URL.createObjectURL(new Blob([`(${pythonWorker})()`], {type: "text/javascript"})));
        worker.onmessage = ({data}) => data.ready ? resolve(worker) : reject(data.failed);
        worker.postMessage({parts: PYODIDE, source: DOCTOR, code: READ, });
      };
      document.head.append(script);
    });
  }
  async function read(name, content) {
    found.replaceChildren();
    if (/tfevents/.test(name)) { said.textContent = EVENTS; return; }
    delete said.dataset.text;
    said.textContent = python ? `Reading ${name} …` : "Python starts in this page; that takes some seconds, once.";
    try {
      const worker = await start(), answer = await new Promise((resolve) => { worker.onmessage = ({data}) => resolve(data); worker.postMessage({name, content}); });
      tell(name, answer);
    } catch (e) { said.textContent = String(e); python = undefined; }
  }
  const readFile = async (file) => read(file.name, new Uint8Array(await file.arrayBuffer()));

  function tell(name, {error, failed, text, findings = [], curves}) {
    const n = findings.length;
    said.textContent = error ?? failed ?? (n ? `${n} finding${n > 1 ? "s" : ""} in ${name}.` : text);
    said.dataset.text = error ?? text ?? "";
    found.replaceChildren(...findings.map((x) => make("section", {}, make("h3", {}, x.text.split("\n")[0]), curve(x, curves[x.column]),
      make("p", {}, x.why, " ", make("a", {href: `${x.page}.html`}, "The lesson")))));
    if (!n) return;
    const report = `\`rlhf-notes doctor\` on ${name}:\n\n\`\`\`text\n${text}\n\`\`\`\n`;
    const copy = button("Copy for an issue", async () => {
      try { await navigator.clipboard.writeText(report); copy.textContent = "Copied"; } catch { area.select(); }
    });
    const area = make("textarea", {readonly: true, rows: 6, "aria-label": "the report as text", value: report});
    found.append(make("details", {}, make("summary", {}, "the report as text"), area, copy));
  }
  // The column over the steps, with the place that the finding is of.
  function curve({column, step}, points) {
    if (!points) return "";
    const [steps, values] = points, pairs = steps.map((s, i) => [s, values[i]]).filter(([, v]) => v !== null);
    if (pairs.length < 2) return "";
    const ys = pairs.map(([, v]) => v), low = Math.min(...ys), high = Math.max(...ys), room = 0.1 * (high - low) || 1, short = (v) => String(+v.toPrecision(3)).replace("-", "−");
    const chart = new Chart(column, {x: [pairs[0][0], pairs.at(-1)[0]], y: [low - room, high + room], yticks: low < high ? [low, high] : [low], ytext: short, xticks: [pairs[0][0], pairs.at(-1)[0]], xlabel: "step", width: 330, height: 140});
    const at = pairs.find(([s]) => s === step);
    chart.line(pairs, "first");
    if (at) {
      chart.line([[step, low - room], [step, high + room]], "faint");
      chart.add("circle", {class: "dot", cx: chart.X(step), cy: chart.Y(at[1]), r: 6});
    }
    return chart.svg;
  }
  box.append(make("p", {}, "Read your log here. Nothing you give leaves this page: Python runs in it."),
    make("div", {class: "dials"}, make("label", {class: "dial"}, make("span", {}, "a log"), file)), pasted,
    make("p", {class: "buttons"}, button("Read what is pasted", () => read(nameOf(pasted.value), new TextEncoder().encode(pasted.value)))), said, found);
  for (const kind of ["dragover", "drop"]) box.addEventListener(kind, (e) => {
    if (!e.dataTransfer?.types.includes("Files")) return;
    e.preventDefault();
    if (kind === "drop") readFile(e.dataTransfer.files[0]);
  });
});
const SCRIPTS = document.currentScript.src;
