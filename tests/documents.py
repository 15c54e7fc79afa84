"""The README and the pages of docs/, Chinese ones too (*.zh.md), as tests read them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
TEXT = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}


def code_words(text):
    """Returns what stands in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def documented_metrics():
    cells = re.findall(r"^\| (`.*?) \|", TEXT["docs/metrics.md"], re.MULTILINE)
    return {name for cell in cells for name in code_words(cell)}
