"""Reads the number that a completion commits to, and compares it with the gold answer.

    is_right("<answer>$70,000</answer>", "... #### 70000") -> True

It takes one number, by its place: listing candidates never pays, nor does copying the question
("3 + 4" for 7). It reads English, Chinese, Japanese, Korean and Arabic, but no number in words
("eighteen", 十八).
"""

import functools
import logging
import re
from fractions import Fraction

MAX_NUMBER_CHARS = 60  # a longer one is not an answer, and int() itself refuses 4301 digits
INSIDE = r"((?:(?!</?(?:think|answer)>).)*)"  # text without a tag: no second block, none nested
BLOCK = re.compile(rf"<answer>{INSIDE}</answer>", re.DOTALL)
FORMAT = re.compile(rf"\s*<think>{INSIDE}</think>\s*<answer>{INSIDE}</answer>\s*", re.DOTALL)

# --- Other scripts, as English has it ---
MARKS = {full: full - 0xFEE0 for full in range(0xFF01, 0xFF5F)}  # the full-width ASCII
MARKS |= {zero + n: str(n) for zero in (0x660, 0x6F0) for n in range(10)}  # Arabic-Indic digits
MARKS |= str.maketrans("\u2212\u066b\u066c\u060c\u066a￥￦【", "-.,,%¥₩ ")
MARKS |= str.maketrans({"。": ". ", "۔": ". ", "！": "! ", "？": "? ", "؟": "? ", "】": ": "})
EXPONENT = dict(zip("百백千천万萬만亿億억", (2, 2, 3, 3, 4, 4, 4, 8, 8, 8), strict=True))
WORDS = [(re.compile(pattern), to) for pattern, to in (  # fast: a literal or digit comes first
    (r"(\d)((?:[ *$]|\\text\{)*)((?:[万萬亿億백천만억]|千(?![克米瓦卡])|百(?![分合])){1,4})",
     lambda found: f"{found[1]}e{sum(map(EXPONENT.get, found[3]))}{found[2]} "),  # 千克 is kg
    (r"(\d{1,9})\s*(?:分之|分の|분의)\s*(\d+)", r" \2/\1"),
    (r"(?:负|負|零下|マイナス|마이너스)(?<!\d[负負])\s*(?=\d)", " -"),
    (r"等[于於]|يساوي", "="),
    (r"答案(?!\w{0,5}不)[^\W\d]{0,6}?[是为為]|答えは|正解は|답은", " answer:"),
    (r"ال(?:جواب|.جابة) (?:\w+ )?ه[وي]\b", " answer:"),
    (r"(?:答案|答え|正解|答(?<![解回]答)|답|ال(?:جواب|.جابة))(?=[\s*]*[:=])", " answer "),
    (r"或者?(?![许許])|还是(?=\d)|または|もしくは|か(?=\s*\d)|또는|이나(?=\s*\d)|أو\b", " or "),
    (r"(\d)\s*(?:[和与與及又到至とや과와و]|から|에서|إلى)\s*(?=\d)", r"\1 and "),
    (r"[\u0590-\u0eff\u3005-\ud7ff]+", r" \g<0> "),  # else a word would run into its number
)]  # fmt: skip
# --- Where the answer stands ---
# "#### 18", but neither the Markdown heading "#### Step 2" nor "#### 2. Add" nor "#### （2）计算"
HASHES = re.compile(r"####(?!\s*\(?\d+[.)、]\s+[^\W\d_a-z])\s*((?:\\[a-z]+|[^\w\n]){0,20}\d[^\n]*)")
BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
REST = r"(?:(?![.!?](?:\s|$)).){0,200}"  # of a sentence
NUMERIC = rf"(?=.{{0,200}}\d)({REST}\d{REST})"  # looks for the digit first: REST is slow
ANCHOR = re.compile(rf"(?im)(?:answer\b[^.:=\d]{{0,40}}?(?:\bis\b|:|=) ?:?|^A:)\s*{NUMERIC}")
# --- What it says ---
CLEAN = [(re.compile(pattern, re.DOTALL), to) for pattern, to in (
    (r"<<.*?>>", ""),  # GSM8K's calculator notes
    (r"\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{([^{}]*)\}", r" \1 "),
    (r"(?<=\d)(?:\{,\}|\\[,!])(?=\d{3}(?!\d))", ","),  # 70{,}000 and 70\,000
    (r"\\[dt]?frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)(\d))", r" \1\3/\2\4"),  # 2\frac{1}{2}
    (r"\\(?:left|right|quad)(?![a-z])|\\[,;:! ()\[\]]|[*_`#]+|(?<=\w)\\?\$(?!\d)|\\(?=%)", " "),
    (r"(?<!\w)\\?[$€£¥₩]\s*", ""),
    (r"\((?!\s*or\b)(?=[^()]*[^\W\d_])[^()]*\)", " "),  # an aside, "(from 3 boxes)"
    (r"(?<=[A-Za-z\u3005-\ud7ff])\s?\^\{?\d\}?", ""),  # the square of "18 cm^2"
    (r"^(?!.*(?:\bor\b|\\vee|\\lor)).*(?:[=≈]|\\approx)", ""),  # 3 + 4 = 7 is 7
    (r"^\s*-\s+(?=[.\d])", "-"),
)]  # fmt: skip
NUMBER = re.compile(
    r"(?<!\w)[-+]?(?:(?:\d+\s+)?\d+\s*/\s*0*[1-9]\d*(?!\d|e\d)"  # 1/2, 2 1/2
    r"|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,2}(?!\w))?|\.\d+)"
)
# "#" stands for a number: two with no word between them are a list, a range or a sum left undone.
GAP = r"#(?:[^\w#]|\b(?:and|to|or|x|maybe|perhaps|possibly|either|also)\b)*"
FIRST_UNSURE = re.compile(rf"(?is)\W*?(?:{GAP}#|#[^#]*\bor\b.*#|#\s*[+×÷])")
LAST_UNSURE = re.compile(rf"(?i)(?:{GAP}|#[^#]*\bor\b[^#]*|[+×÷/]\s*)#[^#]*$|#\s*[+×÷][^#]*$")
LATEX = re.compile(r"\\[A-Za-z]|[\^√]")
# Bounds what math-verify sees: its timeout, by SIGALRM, does not stop 9^{9^9}; nor its parser at
# braces in braces, {{{1}}}, each of which makes it slower by half
SAFE = re.compile(
    r"(?s)(?!.{121})(?!(?:.*(?<![a-z}^])\{){4})"
    r"(?:[\d.,\s{}]|(?<![\d}])-|\\[dt]?frac|\\sqrt\{\d{1,9}\}"
    r"|\\(?:times|cdot)\s*10(?=\^)|(?<=\d)\^(?:\d|\{-?\d\d?\}|\{?\\circ\}?)(?!\s*\^))*"
)


def is_right(text, gold):
    """Returns whether the final answer of `text` has the value of `gold`: exactly, or, in LaTeX, by
    math-verify. Raises ValueError if `gold` ("... #### 18", or "18" alone) is not a number."""
    answer, marked = final_answer(text)
    value, answer = gold_number(gold), cleaned(answer)
    if LATEX.search(answer):
        return bool(SAFE.fullmatch(answer)) and is_equal_latex(answer, value)
    return number(answer, marked) == value


def gold_number(gold):
    """Returns the number after "####", or in the whole text, as a Fraction; else ValueError."""
    text = cleaned(plain(str(gold).rsplit("####", 1)[-1]))
    value = number(text, True)
    if value is None:
        raise ValueError(f"the gold answer {text!r} is not a number: correct the data")
    return value


def final_answer(text):
    """Returns the words that hold the answer, and whether they are marked as such.

    >>> final_answer("<answer>5</answer> no, <answer>6</answer>")
    ('6', True)
    """
    block = BLOCK.findall(text)[-1:]
    text = plain(block[0] if block else text)
    marked = HASHES.findall(text) or BOXED.findall(text) or ANCHOR.findall(text) or block and [text]
    numeric = [s for s in re.split(r"[.!?](?=\s|$)|\n(?:\s*- )?", text) if re.search(r"\d", s)]
    return (marked or numeric or [""])[-1].strip(), bool(marked)


def plain(text):
    """Returns `text` with digits, marks and some words of other scripts put in English."""
    if text.isascii():
        return text
    text = text.translate(MARKS)
    for pattern, to in WORDS:
        text = pattern.sub(to, text)
    return text


@functools.lru_cache(1024)  # the completions of a group have one gold answer, and often their own
def cleaned(text):
    """Returns the text of an answer without units, formatting and equations around its number."""
    for pattern, to in CLEAN:
        text = pattern.sub(to, text).strip()
    return text


@functools.lru_cache(1024)
def number(text, marked):
    """Returns the Fraction that cleaned `text` commits to; None if it has none, many or a sum.

    >>> number("12 apples from 3 boxes", True)
    Fraction(12, 1)
    """
    found, shape = NUMBER.findall(text), NUMBER.sub("#", text)
    first = marked and re.match(r"[\s(]*#", shape)  # an answer's opening number, else the last
    unsure = FIRST_UNSURE.match(shape) if first else LAST_UNSURE.search(shape)
    digits = re.sub(r"\s*/\s*", "/", found[0 if first else -1].replace(",", "")) if found else ""
    if unsure or LATEX.search(text) or not 0 < len(digits) <= MAX_NUMBER_CHARS:
        return None
    size = sum(Fraction(part) for part in digits.lstrip("+-").split())
    undone = "/" in digits and size.denominator == 1  # 84/2 for 42
    return None if undone else -size if digits[0] == "-" else size


def is_equal_latex(answer, value):
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text):
        latex = [LatexExtractionConfig()]
        return parse(f"${text}$", latex, fallback_mode="no_fallback", parsing_timeout=0)

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no timeout is set
    return verify(read(value), read(answer), timeout_seconds=0, raise_on_error=True)
