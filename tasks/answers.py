"""Reads the number that a completion commits to, and compares it with the gold answer.

    is_right("<answer>$70,000</answer>", "... #### 70000") -> True

It takes one number, chosen by its position, so that a list of candidates ("17 or 18"), or a copy of
the question ("3 + 4" for 7), earns nothing. It knows English phrases only, no numbers in words
("eighteen"), and no LaTeX or power that must be computed ("2^3", "2³").
"""

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 60  # a longer one is not an answer, and int() itself refuses 4301 digits
INSIDE = r"((?:(?!</?(?:think|answer)>).)*)"  # text without a tag: no second block, none nested
BLOCK = re.compile(rf"<answer>{INSIDE}</answer>", re.DOTALL)
FORMAT = re.compile(rf"\s*<think>{INSIDE}</think>\s*<answer>{INSIDE}</answer>\s*", re.DOTALL)
# An "aha moment" (docs/coming_from.md). "Wait" begins a sentence: questions are about waiting, too
AGAIN = re.compile(r"(?im)(^|[.!?>]\s*|\bbut )wait\b|\b(however|let me \S*check)\b|不对|重新检查")

# --- Where the answer stands ---
# "#### 18", but no Markdown heading: "#### Step 2", "#### 2. **Add**", "#### （2）计算"
HEADING = r"[ *_(（]*\d+[.:：)）、](?!\d)[^\w\n]*[^\W_a-z]"
HASHES = re.compile(rf"(?<!#)####(?!#|{HEADING})\s*((?:\\[a-z]+|[^\w\n]){{0,20}}\d[^\n]*)")
BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
REST = r"(?:(?![.!?](?:\s|$)).){0,200}"  # the rest of a sentence
NUMERIC = rf"(?=.{{0,200}}\d)({REST}\d{REST}(?:[.!?]?\n\n)?)"  # the digit first: REST is slow
BULLET = r"\**+[^\S\n]*+(?:\n\s*+(?:- +)?)?+"  # but "The answer is - 18" is negative
ANCHOR = re.compile(rf"(?im)(?:answer\b[^.:=\d]{{0,40}}?(?:\b(is)\b|:|=) ?:?|^A:){BULLET}{NUMERIC}")
# After "Answer:" a reasoning may begin: "She sells 9 eggs. So ...", "9 * 2 = 18 a day. So ...". It
# does not if a number comes first ("18 dollars", "x = 18"), or if a sentence is the whole paragraph
COMMITTED = re.compile(r"(?i)(?:\\[a-z]+|[a-z]\b|\W)*+\d[^=]*$|[^=]*\n\n")
ASSUMED = re.compile(  # before the "=" of "If x = 9, then she has 18 eggs"
    r"(?i)\b(?:if|since|when|because|given|let|suppose)\s[^+*/×÷-]{0,80}(?<!\w)(?<!\d\s)[^\W\d_]\W*\Z"
)
# --- Which number it is ---
UNITS = [  # of one dimension each
    r"decades?|years?|yrs?|months?|weeks?|days?|d|hours?|hrs?|h|minutes?|mins?|m|seconds?|secs?|s",
    r"miles?|mi|yards?|feet|foot|ft|inch(?:es)?|in|k?m|[cm]m|(?:kilo|centi|milli)?met(?:er|re)s?",
    r"tons?|stones?|pounds?|lbs?|ounces?|oz|[km]?g|(?:kilo|milli)?grams?",
    r"gallons?|gal|quarts?|qt|pints?|pt|cups?|tsp|tbsp|m?l|(?:milli)?lit(?:er|re)s?",
    r"dollars?|euros?|pounds?|rupees?|quarters?|dimes?|nickels?|cents?|penn(?:y|ies)|pence|paise",
    r"degrees?|minutes?",
]
# An amount before another of its dimension but not of its unit ("2 h 45 min", "two hours and a
# quarter"), or before a bare one ("5 ft 3", "2 dozen and 3"); newlines join within an answer
WHOLE, SPACE = r"(?![^\W\d_])", r"[^\S\n]*"
WORDS = r"(?<=and )an?|half|quarter|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
WORDS = rf"\b(?:(?:{WORDS}|\w{{3,6}}t(?:een|y)){WHOLE}[ -]?){{1,2}}"
AMOUNT = rf"(?:(?<![\d.,/])\d[\d.,/]*|{WORDS}){SPACE}-?"
NEXT = rf"(?:\s|[-–—+,;]|\(?\b(?:and|plus)\b|\(?&)*{AMOUNT}"
PAIRS = [
    rf"(?=(\w{{3}})|)(?:(?:hrs?|mins?|ft|lbs?)\.|(?:{u}){WHOLE})(?={NEXT}(?!\{i})(?:{u}){WHOLE})"
    for i, u in enumerate(UNITS, start=1)
]
BARE = rf"(?:h|hrs?|hours?|feet|foot|ft|m|lbs?|pounds?|dozens?){WHOLE}(?=[ -]*(?:and )?{AMOUNT}"
TWO_UNITS = rf"(?i){AMOUNT}(?:{'|'.join(PAIRS)}|{BARE}(?:[^\w\s]|$)))", "0, 0, "  # a list instead
CLEAN = [(re.compile(pattern, re.DOTALL), to) for pattern, to in (
    (r"<<.*?>>", ""),  # GSM8K's calculator notes
    ("\u2212|[\u2013\u2014](?=\\S)", "-"),  # minus; an en or em dash as one
    (r"\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{([^{}]*)\}", r" \1 "),
    (r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3}(?!\d))", ","),  # 70{,}000 and 70,\!000
    (r"\\[dt]?frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)(\d))", r" \1\3/\2\4"),  # 2\frac{1}{2}
    (r"\\(?:left|right|quad)(?![a-z])|\\[,;:! ()\[\]]|[*_`#~]+|(?<=\w)\\?\$(?!\d)|\\(?=%)", " "),
    (r"(?<!\w)(?:\\?[$€£¥₩]|(?<=-)(?:US\$|USD|EUR|GBP|INR|Rs\.?))\s*", ""),
    (r"(?i)(?<=\d) and (?:a|one) half\b", " 1/2"),
    (r"(?i)(?<=\d) and (?:a|one) quarter\b", " 1/4"),
    (r"(?i)(?<=\d) and three[ -]quarters\b", " 3/4"),
    (r"(?<=\d) and (?=\d+/\d)", " "),
    (r"^\(([^()]*)\)\W*$", r"\1"),
    (r"\((?!\s*(?:or|and|plus|&)\b)(?=[^()]*[^\W\d_])[^()]*\)", " "),  # an aside, "(from 3 boxes)"
    (r"(?i)(^\s*|[:=]\s*|\b(?:is|to|are)\s+)(?:minus|negative)\s+(?=[.\d])", r"\1-"),
    (r"(?<=[^\W\d_])(?:\s?\^\{?\d\}?|[⁻⁰¹²³⁴-⁹]+)", ""),  # the square of "18 cm^2"
    # 3 + 4 = 7 is 7; but ">= 7"
    (r"^(?!.*(?:\bor\b|\\vee|\\lor)).*(?:(?<![<>!])=>?|≈|\\approx)", ""),
    (r"^\s*-\s+(?=[.\d])", "-"),
    TWO_UNITS,
)]  # fmt: skip
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALES |= {"lakh": 10**5, "crore": 10**7, "mn": 10**6, "bn": 10**9}
WORD = rf"(?i:{'|'.join(SCALES)})"
SIGNS = {"k": 3, "K": 3, "M": 6, "B": 9, "十": 1, "百": 2, "千": 3, "천": 3}  # powers of 10
SIGNS |= dict.fromkeys("万萬만", 4) | dict.fromkeys("亿億억", 8) | dict.fromkeys("兆조", 12)
SCALE = rf"(?:[\s~-]*{WORD}s?\b|(?<=\d)[kKMB]\b|\s*[{''.join(SIGNS)[4:]}](?![米克瓦升卡赫]))*"
NUMBER = re.compile(
    r"((?<![A-Za-z_\d])[-+]?(?:(?:\d+\s+)?\d+\s*/\s*0*[1-9]\d*(?!\d|e\d)"  # 1/2, 2 1/2
    r"|(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,2}(?!\w))?|\.\d+))"
    rf"({SCALE})"  # 5 million, 3万
)
FRACTIONS = {ord(c): f" {a}/{b}" for c, a, b in zip("½⅓⅔¼¾⅛⅜⅝⅞", "112131357", "233448888")}
# "#" stands for a number. Two numbers without a word between them are a list, a range or a sum that
# is not computed. Words in other scripts do not count as words: "5或6" is two numbers, too.
GAP = r"#(?:[^\w#]|[^\x00-\x7f]|\b(?:and|plus|to|or|x|maybe|perhaps|possibly|either|also)\b)*"
# What denies, bounds or takes as an operand: words before a number, words after it
SAID = "be|been|equal|to|is|it|that|think|the|answer|exactly|possibly|even|really|quite|actually|as"
BEFORE = (
    r"(?:(?:\b(?:(?:can)?not|never|hardly|anything but|no way|(?:is|do|ca|does|was)nt)|n['’]t)\b"
    rf"(?:\s+(?:{SAID})\b)*|\b(?:at (?:least|most)|(?:more|less|rather|other|\w+er) than|under"
    r"|above|below|(?<!left )(?<!pull )over|(?<!add )(?<!adds )(?<!round )(?<!rounded )(?<!# )up to"
    r"|almost|nearly|exceeds?|except|but not|(?:min|max)(?:imum)?(?: of)?|sqrt|log|ln|sin|cos|mod"
    r"|times|minus|twice|(?:doubl|tripl)e|root(?: of)?"
    r"|(?:half|thirds?|quarters?|percent|squared?|cubed?) of)"
    r"|(?<![=-])(?<!answer)[<>≤≥≠√]=?|!=|[#%] of)[^\w#:,;]*#"
)
AFTER = (
    r"#(?:[ixy](?![a-z])|\s*(?:π|(?:pi|choose|mod|squared|cubed|factorial|doubled|halved)\b"
    r"|to the power|(?:multiplied|divided) by|(?:(?:%|percent|times|minus|over|less"
    r"|[,.?!]? ?(?:no|wait|i mean)\b[^#]*)(?: of)?)\s+#)|(?:\s+[a-z]+)??\s+(?:at (?:least|most)\b"
    r"|(?:min|max)imum\b|or (?:more|less|fewer|higher|lower|greater|larger|older|later|above|below"
    r"|over|under|so)\b|and (?:up|above|below)\b|(?:is|was)(?: wrong| incorrect| false"
    r"| too (?:high|low|big|large|small)|(?:n['’]t| not) (?:right|correct|the|it))\b))"
)
FIRST_UNSURE = re.compile(rf"(?is)\W*?(?:{GAP}#|#[^#]*\bor\b.*#|#\s*[+×÷]|{AFTER})")
UNSURE = rf"(?:{GAP}|#[^#]*\bor\b[^#]*|[+×÷/]\s*)#|#\s*[+×÷]|{BEFORE}|{AFTER}"
LAST_UNSURE = re.compile(rf"(?i)(?:{UNSURE})[^#]*$")
# Beside a gold number only its unit may stand: letters at the digit are of UNITS ("5kg", not "3i"),
# other words neither compute nor bound
NO_UNIT = r"(?:to|not|is|than|or|and|plus|minus|times|choose|mod(?:ulo)?|base|binary|octal|decimal"
NO_UNIT += r"|squared|cubed|factorial|if|over(?=\s\w)|under|above|below|up|off|pi|root|sqrt|sin|cos"
NO_UNIT += r"|halve[ds]|doubled|tenths|thirds|dozens?|(?:min|max)imum|max|roughly|maybe|ish)\b"
GOLD = re.compile(
    r"(?i)(?:(?:(?:US|HK|[RCA])?\$|[₹₽₪＄￥]|USD?|EUR|GBP|CHF|INR|Rs\.?)\s*)?#(?:[\s/%％€£¥₩$¢·.'’-]"
    rf"|°[CF]?|[\u3040-\u9fff\uac00-\ud7af]|(?:{'|'.join(UNITS)}|[µμ]\w){WHOLE}"
    rf"|(?<=[\s/·'’-])(?:(?!{NO_UNIT})[^\W\d_]{{2,}}|(?-i:[A-ZΩ]|an?|s|e(?=-)){WHOLE}))*+"
)
ODD = re.compile(rf"(?i)[=≈~]|approx|about|\({NO_UNIT}|以[上下]|左右|多|一半|超过")
OPEN = re.compile(rf"\\[A-Za-z]|[\^√⁰¹²³⁴-⁹₀-₉⅐-⅞]|{WORD}ths?\b")  # to be computed


def is_right(text, gold):
    """Returns whether the final answer of `text` has exactly the value of `gold`. Raises ValueError
    if `gold` ("... #### 18", or "18" alone) is not a number."""
    answer, marked = final_answer(text)
    return number(cleaned(answer), marked) == gold_number(gold)


def gold_number(gold):
    """Returns the number after "####", or in the whole text, as a Fraction. Raises ValueError if
    anything but a unit, a percent sign or a currency stands beside it."""
    text = str(gold).translate(FRACTIONS).rsplit("####", 1)[-1].strip(" \n\t\"';,")
    value = number(clean := cleaned(text), True)
    if value is None or ODD.search(text) or not GOLD.fullmatch(NUMBER.sub("#", clean)):
        why = "is not a number with at most one unit: correct the data"
        raise ValueError(f"the gold answer {text!r} {why}")
    return value


def final_answer(text):
    """Returns the words that hold the answer, and whether their first number is it: the text marks
    them as its answer, or they are an equation.

    >>> final_answer("<answer>5</answer> no, <answer>6</answer>")
    ('6', True)
    """
    lines = text.translate(FRACTIONS).split("\n")
    text = "\n".join(re.sub(*TWO_UNITS, x) for x in lines)  # here: "hrs." ends no sentence
    block = BLOCK.findall(text)[-1:]
    text = block[0] if block else text
    marked = HASHES.findall(text) or BOXED.findall(text) or anchored(text) or block and [text]
    numeric = [s for s in re.split(rf"[.!?](?=\s|$)|\n(?:{SPACE}- )?", text) if re.search(r"\d", s)]
    answer = (marked or numeric or [""])[-1].strip()
    left, equals, _ = answer.rpartition("=")  # "3 + 5 = 8 new limbs after 15 days"
    return answer, bool(marked or equals and not ASSUMED.search(left))


def anchored(text):
    """Returns what follows "The answer is" and "Answer:", without what begins a reasoning."""
    digit, found = re.compile(r"\d"), ANCHOR.finditer(text)
    ends = lambda m: m[1] or COMMITTED.match(m[2]) or not digit.search(text, m.end())
    return [m[2] for m in found if ends(m)]


def cleaned(text):
    """Returns the text of an answer without units, formatting and equations around its number."""
    for pattern, to in CLEAN:
        text = pattern.sub(to, text).strip()
    return text


def number(text, marked):
    """Returns the Fraction that cleaned `text` commits to; None for no number, several, or a sum.

    >>> number("12 apples from 3 boxes", True)
    Fraction(12, 1)
    """
    found, shape = NUMBER.findall(text), NUMBER.sub("#", text)
    first = marked and re.match(r"[\s(]*#", shape)  # an answer's opening number, else the last
    unsure = FIRST_UNSURE.match(shape) if first else LAST_UNSURE.search(shape)
    digits, scale = found[0 if first else -1] if found else ("", "")
    digits = re.sub(r"\s*/\s*", "/", digits.replace(",", ""))
    if unsure or OPEN.search(text) or not 0 < len(digits) <= MAX_NUMBER_CHARS:
        return None
    size = sum(Fraction(part) for part in digits.lstrip("+-").split())
    undone = "/" in digits and size.denominator == 1  # 84/2 for 42
    for word in re.findall(rf"{WORD}|[{''.join(SIGNS)}]", scale):
        size *= 10 ** SIGNS[word] if word in SIGNS else SCALES[word.lower()]
    return None if undone else -size if digits[0] == "-" else size
