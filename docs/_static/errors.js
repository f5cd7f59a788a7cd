// The box above the list of errors: shows the sections that contain every word.
document.addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("hvd-search"), found = document.getElementById("hvd-found");
  const groups = [...document.querySelectorAll("article section section")].filter(s => s.querySelector(":scope > h2"));
  const codes = [...document.querySelectorAll("article section")].filter(s => /^HVD\d{3}/.test(s.querySelector(":scope > h3")?.textContent || ""));
  const texts = codes.map(s => s.textContent.toLowerCase());
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    codes.forEach((s, i) => { s.hidden = !words.every(w => texts[i].includes(w)); shown += !s.hidden; });
    groups.forEach(g => { g.hidden = !g.querySelector("section:not([hidden])"); });
    found.textContent = words.length ? `${shown} of ${codes.length}` : "";
  };
  box.addEventListener("input", filter);
  if (location.hash.startsWith("#?")) { box.value = decodeURIComponent(location.hash.slice(2)); filter(); }
});
