// The box above the list of errors. It shows the sections of the codes in the text, else those that contain every
// word, else that of the nearest message: the rules of hvdlite/errors/catalogue.py and message_index.py.
const hvdWords = text => new Set(text.toLowerCase().match(/[a-z][a-z_-]*[a-z]/g) || []);

function hvdNearest(text, messages) {
  const told = messages.map(([, message]) => hvdWords(message)), seen = {};
  told.forEach(words => words.forEach(word => { seen[word] = (seen[word] || 0) + 1; }));
  const weight = words => words.reduce((sum, word) => sum + Math.log(1 + told.length / seen[word]), 0);
  let best = 0, code = null;
  for (const part of [text, ...text.split("\n")]) {
    const given = hvdWords(part);
    told.forEach((words, i) => {
      const shared = [...words].filter(word => given.has(word));
      if (shared.length < 3) return;
      const share = weight(shared) / weight([...words]), score = share * share * weight(shared);
      if (share >= (shared.length < 6 ? 0.5 : 0.35) && score > best) [best, code] = [score, messages[i][0]];
    });
  }
  return code;
}

// Which sections (lists of code and text in lower case) are shown for this text?
function hvdShown(text, sections, messages) {
  const any = test => { const found = sections.map(test); return found.includes(true) ? found : null; };
  const codes = text.match(/\[HVD\d{3}\]/g) || text.toUpperCase().match(/\bHVD\d{3}\b/g) || [];
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return any(([code]) => codes.some(each => each.includes(code))) ||
    any(([, said]) => words.every(word => said.includes(word))) ||
    (nearest => sections.map(([code]) => code === nearest))(hvdNearest(text, messages));
}

if (typeof document === "undefined") module.exports = hvdShown;
else document.addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("hvd-search"), found = document.getElementById("hvd-found");
  const messages = JSON.parse(document.getElementById("hvd-messages").textContent);
  const groups = [...document.querySelectorAll("article section section")].filter(s => s.querySelector(":scope > h2"));
  const codes = [...document.querySelectorAll("article section")].filter(s => /^HVD\d{3}/.test(s.querySelector(":scope > h3")?.textContent || ""));
  const sections = codes.map(s => [s.querySelector("h3").textContent.slice(0, 6), s.textContent.toLowerCase()]);
  const filter = () => {
    const shown = hvdShown(box.value, sections, messages);
    codes.forEach((s, i) => { s.hidden = !shown[i]; });
    groups.forEach(g => { g.hidden = !g.querySelector("section:not([hidden])"); });
    found.textContent = box.value.trim() ? `${shown.filter(Boolean).length} of ${codes.length}` : "";
  };
  box.addEventListener("input", filter);
  if (location.hash.startsWith("#?")) { box.value = decodeURIComponent(location.hash.slice(2)); filter(); }
});
