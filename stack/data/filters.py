"""The quality filters of the Stack-100M recipe: which documents of a source are kept.

They look at one document each (of a long one at its beginning).  Near-duplicates are another matter: run datatrove's
MinHash pipeline first and name the folder of .jsonl.gz files that it writes.
"""

import re
import string
from collections import Counter

NO_LETTERS = bytes(set(range(128)) - set(string.ascii_letters.encode()))
NO_DIGITS = bytes(set(range(128)) - set(string.digits.encode()))
NOT_ASCII = re.compile(r"[^\x00-\x7f]")
FORMULA = re.compile(r"[=+^<>∑∫√≤≥≠±×÷]|\\[a-zA-Z]+|\$")


def keep_web(text: str) -> bool:
    """Prose: 50 to 100,000 words of 3 to 10 characters on average, mostly letters, few digits, few repeated lines."""
    words = text.split()
    lines = [line for line in text.split("\n") if line.strip()]
    return (50 <= len(words) <= 100_000 and 3 <= sum(map(len, words)) / len(words) <= 10
            and count(text, NO_LETTERS, str.isalpha) >= 0.60 * len(text)
            and count(text, NO_DIGITS, str.isdigit) <= 0.20 * len(text)
            and len(lines) - len(set(lines)) <= 0.30 * len(lines))


def keep_code(text: str) -> bool:
    """Source: 20 to 200,000 characters, none but white space making up more than 30 % (number tables, ASCII art)."""
    if not 20 <= len(text) <= 200_000:
        return False
    return max((n for char, n in Counter(text).items() if not char.isspace()), default=len(text)) <= 0.30 * len(text)


def keep_math(text: str) -> bool:
    """At least 20 words, and mathematics in it: 3 % digits or three marks of formulas."""
    return len(text.split()) >= 20 and (count(text, NO_DIGITS, str.isdigit) >= 0.03 * len(text)
                                        or len(FORMULA.findall(text)) >= 3)


def count(text, others, test):
    """How many characters pass the test; ASCII ones by deleting the others, thirty times faster than asking each."""
    plain = text.encode("ascii", "ignore")
    foreign = NOT_ASCII.findall(text) if len(plain) < len(text) else ()
    return len(plain.translate(None, others)) + sum(map(test, foreign))


FILTERS = {"": lambda text: True, "web": keep_web, "code": keep_code, "math": keep_math}
