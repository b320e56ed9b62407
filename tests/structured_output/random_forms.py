"""Random regular expressions and context-free grammars, and an independent word on what they allow."""

import random
import re
from dataclasses import dataclass
from typing import Any

LITERALS = [*"abcxyzABZ0159 _-,:;=<>/@#%&~'", "é", "ß", "λ", "Ж", "中", "€"]
ESCAPED = [rf"\{char}" for char in ".+*?()[]{}|^$\\"] + [r"\n", r"\t"]
CLASSES = ["[a-c]", "[0-9]", "[^a-z]", "[A-F0-9]", "[é-ü]", "[α-ω]", r"[\w.]", r"[^\s]", r"\d", r"\w", "[.+*]", "[x-]"]


# Beyond ASCII, libraries differ on words and digits (by their version of Unicode), and on which controls are space.
BEYOND, SPACE = r"\u0080-\U0010ffff", r" \t\n\r\f\v"


def matches_regex(regex: str, text: str) -> bool:
    meant = regex.replace(r"[\w.]", rf"[\w.{BEYOND}]").replace(r"[^\s]", f"[^{SPACE}]")
    meant = re.sub(r"(?<![\[\\])\\[wd]", lambda found: f"[{found[0]}{BEYOND}]", meant)
    return re.fullmatch(meant, text) is not None


def is_small(regex: str) -> bool:
    """Repeated classes of thousands of characters can make an automaton with no end of states."""
    return r"\w" not in regex and "[^" not in regex


def random_regex(rng: random.Random, depth: int = 2) -> str:
    """Never one that matches only the empty text, and with an end in reach from everywhere."""
    parts = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.35 or depth == 0:
            part = "".join(rng.choices(LITERALS, k=rng.randint(1, 3)))
            part = part if len(part) == 1 else f"(?:{part})"
        elif kind < 0.45:
            part = rng.choice(ESCAPED)
        elif kind < 0.7:
            part = rng.choice(CLASSES)
        else:
            inner = [random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            part = f"{rng.choice(['(', '(?:'])}{'|'.join(inner)})"
        parts.append(part + _repeat(rng))
    return rng.choice(LITERALS[:10]) + "".join(parts)


def _repeat(rng: random.Random) -> str:
    low = rng.randint(0, 3)
    return rng.choice(["", "", "", "?", "*", "+", f"{{{low}}}" if low else "", f"{{{low},{low + 3}}}", f"{{{low},}}"])


@dataclass
class Grammar:
    """`rules[name]` are alternatives, each a list of literals (in quotes), character classes, and names of rules."""

    rules: dict[str, list[list[str]]]

    def ebnf(self) -> str:
        return "\n".join(f"{name} ::= {self._body(name)}" for name in self.rules)

    def lark(self) -> str:
        text = "\n".join(f"{'start' if name == 'root' else name}: {self._body(name)}" for name in self.rules)
        return text.replace("root", "start").replace("[", "/[").replace("]", "]/")

    def _body(self, name: str) -> str:
        return " | ".join(" ".join(parts) if parts else '""' for parts in self.rules[name])

    def matches(self, text: str) -> bool:
        """Earley's recognizer: states are (rule, alternative, dot, where it began)."""
        chart: list[dict[tuple[str, int, int, int], None]] = [{} for _ in range(len(text) + 1)]
        chart[0].update(dict.fromkeys(("root", i, 0, 0) for i in range(len(self.rules["root"]))))
        for at, states in enumerate(chart):
            queue = list(states)
            while queue:
                name, which, dot, start = queue.pop()
                parts = self.rules[name][which]
                new: list[tuple[str, int, int, int]] = []
                if dot == len(parts):
                    for other, number, place, began in list(chart[start]):
                        waiting = self.rules[other][number]
                        if place < len(waiting) and waiting[place] == name:
                            new.append((other, number, place + 1, began))
                elif parts[dot] in self.rules:
                    new += [(parts[dot], i, 0, at) for i in range(len(self.rules[parts[dot]]))]
                    # An empty rule may already have completed at this position.
                    if any((parts[dot], i, len(p), at) in states for i, p in enumerate(self.rules[parts[dot]])):
                        new.append((name, which, dot + 1, start))
                else:
                    length = _terminal(parts[dot], text, at)
                    if length is not None:
                        chart[at + length].setdefault((name, which, dot + 1, start))
                for state in new:
                    if state not in states:
                        states[state] = None
                        queue.append(state)
        return any(n == "root" and b == 0 and d == len(self.rules[n][i]) for n, i, d, b in chart[-1])


def _terminal(symbol: str, text: str, at: int) -> int | None:
    """Number of characters it matches there."""
    if symbol.startswith('"'):
        literal = symbol[1:-1]
        return len(literal) if text.startswith(literal, at) else None
    low, high = symbol[1], symbol[3]
    return 1 if at < len(text) and low <= text[at] <= high else None


def random_grammar(rng: random.Random) -> Grammar:
    """Every rule has an alternative without rules, first of all, so an end is always in reach."""
    names = ["root", *(f"r{i}" for i in range(rng.randint(1, 4)))]
    rules: dict[str, Any] = {}
    for name in names:
        alternatives = [[_random_terminal(rng) for _ in range(rng.randint(1, 2))]]
        for _ in range(rng.randint(1, 3)):
            alternatives.append([_random_symbol(rng, names) for _ in range(rng.randint(1, 4))])
        rules[name] = alternatives
    # Not every library accepts left recursion, so every other alternative begins with a terminal.
    for name in names:
        rules[name] = [parts if parts[0] not in names else [_random_terminal(rng), *parts] for parts in rules[name]]
    reached, todo = {"root"}, ["root"]
    while todo:
        for parts in rules[todo.pop()]:
            new = {part for part in parts if part in rules} - reached
            reached |= new
            todo += sorted(new)
    return Grammar({name: rules[name] for name in names if name in reached})


def _random_symbol(rng: random.Random, names: list[str]) -> str:
    return rng.choice(names) if rng.random() < 0.35 else _random_terminal(rng)


def _random_terminal(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(["[a-d]", "[0-9]", "[x-z]"])
    return f'"{"".join(rng.choices("abc(),+ é中", k=rng.randint(1, 3)))}"'
