"""Exact regular expressions for `format` values that libraries enforce too loosely."""

FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # two digits divisible by 4, without 00
LEAP = f"(?:[0-9]{{2}}{FOURTH}|{FOURTH}00)"
YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
DATE = (
    f"(?:{YEAR}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|{LEAP}-02-29)"
)
CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = f"{CLOCK}:[0-5][0-9](?:[.][0-9]{{1,9}})?(?:Z|[+-]{CLOCK})"
OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"

PATTERNS = {
    "ipv4": f"^(?:{OCTET}[.]){{3}}{OCTET}$",
    "date": f"^{DATE}$",
    "time": f"^{TIME}$",
    "date-time": f"^{DATE}T{TIME}$",
}
