"""What people and programs see of a server, or of a trainer that has none (local.py)."""

import bottle

from grpo.serving.dashboard import PLAIN, load_page


def add_views(app, store, policies, pacing, live, reference):
    html, html_headers = load_page()

    app.get("/info", callback=lambda: reference.info)

    @app.get("/stats")
    def stats():
        run = app.read_query()[0] or store.newest_run()
        ledger = {"ledger": store.ledger(run)} if run else {}
        return store.stats() | {"run": run, "workers": pacing.stats()} | ledger

    app.get("/health", callback=lambda: {"ok": True})

    @app.takes_json("/log")
    def log(run: str, records: list, samples: list):
        live.log(run, records, samples)

    @app.get("/live")
    def get_live():
        bottle.response.headers.update(PLAIN)
        return live.snapshot(app.read_query()[0], policies, pacing, reference.info)

    @app.get("/")
    def page():
        bottle.response.headers.update(html_headers)
        return html
