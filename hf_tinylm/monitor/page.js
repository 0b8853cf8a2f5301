"use strict";
// Asks the server every two seconds for the parts of the page that have changed. All text in them is escaped there.
const PERIOD = 2000;
let server = "", version = 0, over = "tokens", timer = null, asking = false;

function put(name, html) {
  const part = document.getElementById(name);
  const open = [...part.querySelectorAll("details[open] > summary")].map((one) => one.textContent);
  const scrolled = [...part.querySelectorAll(".wide")].map((one) => one.scrollLeft);
  part.innerHTML = html;
  part.querySelectorAll("details > summary").forEach((one) => { one.parentNode.open = open.includes(one.textContent); });
  part.querySelectorAll(".wide").forEach((one, place) => { one.scrollLeft = scrolled[place] || 0; });
}

async function ask() {
  clearTimeout(timer);
  if (asking) return;
  asking = true;
  const state = document.getElementById("connection");
  try {
    const answer = await fetch(`data?server=${server}&since=${version}&over=${over}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${answer.status}`);
    const news = await answer.json();
    for (const [name, html] of Object.entries(news.parts)) put(name, html);
    [server, version, document.title] = [news.server, news.version, news.title];
    state.textContent = `as of ${new Date().toLocaleTimeString()}`;
    state.className = "soft";
  } catch (error) {
    state.textContent = `no answer from hf-tinylm monitor since ${new Date().toLocaleTimeString()} (${error.message}); trying again`;
    state.className = "bad";
  }
  asking = false;
  if (!document.hidden) timer = setTimeout(ask, PERIOD);
}

document.querySelectorAll("#axes input").forEach((button) => button.addEventListener("change", () => {
  [over, version] = [button.value, 0];
  ask();
}));
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
ask();
