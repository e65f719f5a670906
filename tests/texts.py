"""Text for the tests, made here: the same on every machine and under every Python, as no library's source is."""

import random

SYLLABLES = ("ba co del en fi gor hu is ja ker lo min nu or pre qua ri sol ter un vi war xe yo zi "
             "str ing tion al er").split()
FORMS = (  # three words, a sentence, a number
    'def {0}_{1}({2}, {0}=None):\n    """{3}"""\n    return {1}.{2}({0}, {4})\n\n\n',
    "class {0}{1}({2}):\n\n    def {1}(self):\n        self.{0} = {4}\n\n",
    "    for {0} in {1}:\n        if {0} != '{2}':\n            {1}[{4}] += 1\n", "{3}  {3}\n\n", "# {3}\n",
    "* {0}: {1} ({4} %), naïve “{2}”, élan – 日本 🙂\n", "        raise {0}('{3}')\n", "{1} = [{4}, '{2}', {0}]\n")


def texts(*sizes: int) -> list[str]:
    """A document of at least so many characters for each size, of words of which some are frequent and most are rare;
    the first ones do not depend on how many are asked for."""
    rng = random.Random(0)
    words = ["".join(rng.choices(SYLLABLES, k=1 + i % 4)) for i in range(900)]
    weights = [1 / (i + 3) for i in range(900)]
    documents = []
    for size in sizes:
        parts, length = [], 0
        while length < size:
            form, some = rng.choices(FORMS)[0], rng.choices(words, weights, k=12)
            sentence = " ".join(some[3:4 + int(rng.random() * 9)]).capitalize() + "."
            parts.append(form.format(*some[:3], sentence, int(rng.random() ** 4 * 5000)))
            length += len(parts[-1])
        documents.append("".join(parts))
    return documents
