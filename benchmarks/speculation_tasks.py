"""Prompts of benchmarks/speculation.py: three tasks whose answers repeat their context, and ordinary questions."""

from dataclasses import dataclass

CODE = [
    '''def moving_average(values, window):
    """The mean of each run of `window` values."""
    if window < 1:
        raise ValueError("window must be at least 1")
    result = []
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        if index >= window - 1:
            result.append(total / window)
    return result


def normalize(values):
    low, high = min(values), max(values)
    if low == high:
        return [0.0 for _ in values]
    return [(value - low) / (high - low) for value in values]
''',
    """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))

    def statement(self):
        for kind, amount in self.history:
            print(f"{self.owner}: {kind} of {amount}")
""",
    """function renderTable(rows, columns) {
  const lines = [];
  const header = columns.map((column) => column.title.padEnd(column.width)).join(" | ");
  lines.push(header);
  lines.push("-".repeat(header.length));
  for (const row of rows) {
    const cells = columns.map((column) => String(row[column.key]).padEnd(column.width));
    lines.push(cells.join(" | "));
  }
  return lines.join("\\n");
}
""",
]
TEXTS = [
    "The lighthouse at Point Arden was built in 1871 after three ships were lost on the reef in a single winter. "
    "Its first keeper, Thomas Hale, lived there with his wife and four children for twenty-two years. The lamp "
    "burned whale oil until 1886, when it was converted to kerosene. In 1934 the tower was wired for electric "
    "light, and the keeper's house was sold to the county. The fog signal, a steam whistle that could be heard "
    "for nine miles, was silenced in 1958. Since 1990 the lighthouse has been a museum, and about forty thousand "
    "people climb its 128 steps every year.",
    "Sourdough bread is made by the fermentation of dough using wild yeast and lactic acid bacteria. The baker "
    "keeps a starter, a mixture of flour and water, which is fed every day with fresh flour. When the starter "
    "doubles in volume within six hours, it is ready to be used. The dough is mixed, folded four times at "
    "intervals of thirty minutes, and left to rise for five hours at room temperature. It is then shaped, placed "
    "in a basket, and kept in the refrigerator overnight. The loaf is baked in a closed pot at 250 degrees for "
    "twenty minutes, and without the lid for twenty more.",
    "The Morrow River rises in the Kestrel Hills and flows two hundred and ten miles to the sea at Port Linden. "
    "Its upper valley is narrow and wooded; below the town of Brackwater it widens into meadows that are flooded "
    "every spring. The river was made navigable in 1822, when eleven locks were built between Brackwater and the "
    "coast. Barges carried slate, timber and wool until the railway came in 1867. Today the locks are kept by "
    "volunteers, and the river is used by canoes, anglers and a ferry that crosses at Linden Reach.",
]
RECORDS = [
    """Order 1041: Maria Chen, 3 desk lamps, 89.70, shipped to 14 Alder Street, Portland, Oregon 97205
Order 1042: James Okafor, 1 standing desk, 449.00, shipped to 220 Harbor Road, Boston, Massachusetts 02110
Order 1043: Priya Natarajan, 2 office chairs, 378.00, shipped to 9 Mill Lane, Austin, Texas 78701
Order 1044: Lukas Brandt, 5 notebooks, 24.75, shipped to 77 Orchard Avenue, Denver, Colorado 80203
Order 1045: Sofia Russo, 1 bookshelf, 129.00, shipped to 3 Canal Street, Chicago, Illinois 60606""",
    """2024-03-02 09:14:22 INFO  server started on port 8080 with 4 workers
2024-03-02 09:15:40 WARN  slow query took 2140 ms: SELECT * FROM invoices WHERE status = 'open'
2024-03-02 09:17:03 ERROR connection to database primary-2 lost after 3 retries
2024-03-02 09:17:05 INFO  switched to database replica-1
2024-03-02 09:21:48 ERROR request 7f3a91 failed: timeout while reading response body
2024-03-02 09:24:10 INFO  database primary-2 is back""",
    """name: Ada Lovelace; born: 1815; field: mathematics; known for: notes on the Analytical Engine
name: Marie Curie; born: 1867; field: physics and chemistry; known for: research on radioactivity
name: Alan Turing; born: 1912; field: computer science; known for: the Turing machine
name: Barbara McClintock; born: 1902; field: genetics; known for: transposable elements""",
]
QUESTIONS = [
    "What is the difference between weather and climate?",
    "Give me three ideas for a birthday party in a park.",
    "Explain how a bicycle stays upright.",
    "Write a short poem about the sea in autumn.",
    "What should I consider before adopting a dog?",
    "How do vaccines work?",
    "Describe a typical day of a medieval baker.",
    "Why is the sky blue at noon and red in the evening?",
]
TOPICS = ("rain", "trains", "tea", "chess", "volcanoes", "bees", "the Moon", "paper")


@dataclass(frozen=True)
class Task:
    prompts: list[str]
    max_tokens: int
    temperature: float = 0.0
    together: bool = False  # all prompts at once


TASKS = {
    "summarise": Task(
        [f"Summarize the following text. Quote its own sentences where you can.\n\n{text}" for text in TEXTS], 160
    ),
    "edit": Task(
        [
            "Add a comment to the first line of this code. Leave everything else as it is and print the whole code."
            f"\n\n```\n{code}```"
            for code in CODE
        ],
        220,
    ),
    "extract": Task(
        [f"{records}\n\nRepeat each line above as an item of a list, word for word." for records in RECORDS], 220
    ),
    "chat": Task(QUESTIONS[:4], 160, temperature=0.7),
    "chat64": Task(
        [f"{question} Answer for somebody who likes {topic}." for question in QUESTIONS for topic in TOPICS],
        96,
        temperature=0.7,
        together=True,
    ),
}
