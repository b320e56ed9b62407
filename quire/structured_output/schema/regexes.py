"""Which regular expressions XGrammar interprets as other engines do, and their length with repeats expanded.

The whole output must match, so anchors at its ends are redundant, and lazy quantifiers equal greedy ones.
"""

import re

PLAIN_ESCAPES = set("dwsnrt")
REPEAT = re.compile(r"\{(\d+)(?:,(\d+)?)?\}")
# An escape, a character class, or a literal character.
ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^()*+?|\\]", re.DOTALL)


def without_anchors(regex: str) -> str:
    regex = regex.removeprefix("^")
    if regex.endswith("$") and (len(regex) - len(regex[:-1].rstrip("\\"))) % 2 == 1:
        regex = regex[:-1]
    return _dots_as_classes(regex)


def regex_unsupported_by_xgrammar(regex: str) -> str | None:
    """The first construct that XGrammar interprets differently or does not support; None if there is none."""
    body = regex.removeprefix("^")
    in_class, depth, i = False, 0, 0
    while i < len(body):
        char, after = body[i], body[i + 1 : i + 2]
        if char == "\\":
            if after.isalnum() and after not in PLAIN_ESCAPES:
                return f"\\{after} in a regex is not supported"
            i += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            if after in ("]", "["):
                return "a bracket at the start of a character class is not supported"
            if after == "^":
                i += 1
        elif char == "(" and after == "?" and body[i + 2 : i + 3] != ":":
            return f"{body[i : i + 3]} in a regex is not supported"
        elif char in "*+?}" and after in ("?", "+") and after:
            return f"the quantifier {char}{after} is not supported"
        elif char == "^" or (char == "$" and i != len(body) - 1):
            return f"{char} inside a regex is not supported"
        elif char == "|" and not depth and (regex[0] == "^" or regex[-1] == "$"):
            return "an anchor beside an alternative is not supported"
        if not in_class and char in "()":
            depth += 1 if char == "(" else -1
        i += 1
    return None


def pattern_unsupported_by_xgrammar(pattern: str) -> str | None:
    """The same for a `pattern` of a JSON string, in which XGrammar does not escape some characters."""
    if '"' in pattern or any(char < " " for char in pattern):
        return "a quote or a control character in a pattern is not supported"
    escapes = re.findall(r"\\(.)", pattern, re.DOTALL)
    if found := set(escapes) & set("\\nrt"):
        return f"\\{min(found)} in a pattern is not supported"
    return regex_unsupported_by_xgrammar(pattern)


def _dots_as_classes(regex: str) -> str:
    """XGrammar's dot also matches line breaks."""
    parts, in_class, i = [], False, 0
    while i < len(regex):
        char = regex[i]
        if char == "\\":
            parts.append(regex[i : i + 2])
            i += 2
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        parts.append(r"[^\n]" if char == "." and not in_class else char)
        i += 1
    return "".join(parts)


def expanded_length(regex: str) -> int:
    """Approximate length of a regular expression with counted repeats expanded, as automata expand them."""
    open_groups, last, i = [0], 0, 0
    while i < len(regex):
        repeat = REPEAT.match(regex, i)
        if repeat is not None:
            most = max(int(number[:9]) for number in repeat.groups("0"))
            open_groups[-1] += last * (most - 1) if most else 0
            last *= max(most, 1)
            i = repeat.end()
            continue
        atom = ATOM.match(regex, i)
        i = atom.end() if atom is not None else i + 1
        if atom is None and regex[i - 1] == "(":
            open_groups.append(0)
        elif atom is None and regex[i - 1] == ")" and len(open_groups) > 1:
            last = open_groups.pop()
            open_groups[-1] += last
        elif atom is not None:
            last = 1
            open_groups[-1] += 1
    return sum(open_groups)
