"""Which regular expressions mean the same to XGrammar as they do elsewhere.

An output matches from its beginning to its end, so anchors there say nothing, and lazy quantifiers are ordinary ones.
"""

import re

PLAIN_ESCAPES = set("dwsnrt")
REPEAT = re.compile(r"\{(\d+)(?:,(\d+)?)?\}")
# An escape, a class, or a character that means itself.
ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^()*+?|\\]", re.DOTALL)


def without_anchors(regex: str) -> str:
    regex = regex.removeprefix("^")
    if regex.endswith("$") and (len(regex) - len(regex[:-1].rstrip("\\"))) % 2 == 1:
        regex = regex[:-1]
    return _dots_as_classes(regex)


def outside_xgrammar(regex: str) -> str | None:
    """The first thing in it that XGrammar reads differently or not at all."""
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
                return "a bracket that opens a class is not supported"
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


def pattern_outside_xgrammar(pattern: str) -> str | None:
    """The same for a pattern of a JSON string, of which XGrammar writes some characters as they are."""
    if '"' in pattern or any(char < " " for char in pattern):
        return "a quote or a control character in a pattern is not supported"
    escapes = re.findall(r"\\(.)", pattern, re.DOTALL)
    if found := set(escapes) & set("\\nrt"):
        return f"\\{min(found)} in a pattern is not supported"
    return outside_xgrammar(pattern)


def _dots_as_classes(regex: str) -> str:
    """XGrammar's dot matches line breaks too."""
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
    """About how long a regular expression is with its counted repeats written out, which automata do."""
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
