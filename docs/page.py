"""The picture in docs/metrics.md: the live page of a demo that has ended, as a browser shows it.

    make pictures       # or: .venv/bin/python -m docs.page 0

Runs demo.py with that seed, serves its run folder by grpo.live, and writes docs/page.png. It needs
chromium and two minutes.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import waitress

import demo
from grpo import live
from grpo.log import in_background

CHROMIUM = shutil.which("chromium")
PICTURE = Path(__file__).with_name("page.png")


def browse(url, *options, size="1200,900", seconds=3):
    """Returns what Chromium prints, and its console, after `seconds` of the page's own clock."""
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-sync", "--mute-audio"]
        command += ["--disable-component-update", "--disable-extensions", "--hide-scrollbars"]
        command += ["--disable-quic", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        command += ["--disable-dev-shm-usage", "--enable-logging=stderr", f"--window-size={size}"]
        command += [f"--user-data-dir={profile}", f"--virtual-time-budget={1000 * seconds}"]
        command += [*options, url]
        done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    lines = done.stderr.decode().splitlines()
    return done.stdout.decode(), [line for line in lines if "CONSOLE" in line]


@contextlib.contextmanager
def serving(app):
    """Serves a WSGI app in a thread, and gives its address."""
    server = waitress.create_server(app, host="127.0.0.1", port=0, threads=4)
    thread = in_background(server.run)
    try:
        yield f"http://127.0.0.1:{server.effective_port}"
    finally:
        server.close()
        thread.join(5)
        server.task_dispatcher.shutdown()


def main(seed):
    if not CHROMIUM:
        sys.exit("no chromium on PATH to make the picture with: apt-get install chromium")
    from PIL import Image, ImageChops  # matplotlib's

    demo.main(int(seed), "plain")
    with serving(live.make_app(demo.RUN_DIR)) as url:
        browse(url, f"--screenshot={PICTURE}", size="1200,2400")
    shot = Image.open(PICTURE).convert("RGB")
    ground = Image.new("RGB", shot.size, shot.getpixel((0, 0)))
    bottom = ImageChops.difference(shot, ground).getbbox()[3] + 16
    shot.crop((0, 0, shot.width, bottom)).quantize(256).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
