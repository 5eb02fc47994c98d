"""The page `/viz`: one HTML text with the module of the widgets inside, nothing from elsewhere.

Imports: viz.views.
"""

from __future__ import annotations

import html
import json
from pathlib import Path

from sgviz.viz.views import themes

MODULE = Path(__file__).with_name("widgets.js")
MOUNT = "sgviz"

STYLE = """
:root { color-scheme: light dark; } body { margin: 0; background: light-dark(%(light)s, %(dark)s); }
#sgviz { max-width: 1500px; margin: 0 auto; padding: 12px 18px; }
#sgviz > header, h1 { font: 600 16px system-ui, sans-serif; }
#sgviz .grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 4px 26px; }
#sgviz h2 { font-size: 14px; margin: 12px 0 6px; border-bottom: 1px solid var(--grid); padding-bottom: 3px; }
@media (max-width: 900px) { #sgviz .grid { grid-template-columns: minmax(0, 1fr); } }
"""

# asks for the key, then fetches the page with it; says nothing about the engine
KEY_PAGE = """<!doctype html><meta charset="utf-8"><title>sgviz: key needed</title>
<meta name="viewport" content="width=device-width"><style>:root { color-scheme: light dark; }
body { font: 14px system-ui, sans-serif; margin: 12vh auto; max-width: 24em; }</style>
<form><p>This page needs the server's %(kind)s key.</p><input type="password" autofocus autocomplete="off">
<button>open</button><p id="said"></p></form><script>
async function open_(key) {
  const answer = await fetch(location.pathname + location.search, { headers: { Authorization: "Bearer " + key } });
  if (!answer.ok) {
    sessionStorage.removeItem("sgviz-key");
    said.textContent = "This key is not the right one.";
    return;
  }
  sessionStorage.setItem("sgviz-key", key);
  const text = await answer.text();
  document.open(); document.write(text); document.close();
}
const said = document.getElementById("said");
document.querySelector("form").onsubmit = (event) => {
  event.preventDefault();
  open_(document.querySelector("input").value);
};
if (sessionStorage.getItem("sgviz-key")) open_(sessionStorage.getItem("sgviz-key"));
</script>"""


def module_text() -> str:
    """The ES module that widgets and page share."""
    return MODULE.read_text(encoding="utf-8")


def live_page(title: str, *, debuggable: bool, rank: int | None = None) -> str:
    """The whole page.

    Args:
        debuggable: the server has /sgviz/debug, so the stepper is shown. rank: which scheduler is shown first; None:
            there is one.
    """
    colours = themes()
    first = {} if rank is None else {"rank": rank}
    options = json.dumps({"themes": colours, "debuggable": debuggable, **first})
    style = STYLE % {"light": colours["light"]["ground"], "dark": colours["dark"]["ground"]}
    # exported names are of use to a bundle of modules only; here all is one script
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><style>{style}</style>
<div id="{MOUNT}"></div>
<script type="module">
{module_text()}
const key = sessionStorage.getItem("sgviz-key") || "";
const shown = page(document.getElementById("{MOUNT}"), {{ ...{options}, key }});
document.getElementById("{MOUNT}").shown = shown;
</script></html>"""


def key_page(kind: str) -> str:
    """What who comes without the key is shown; `kind`: API or admin."""
    return KEY_PAGE % {"kind": html.escape(kind)}
