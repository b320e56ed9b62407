"""Codes of 4 and 8 bits, and their scales, to numbers in the registers that hold them."""

import torch
import triton
import triton.language as tl

from quire.kernels.int_linear import E2M1_BITS, LOOKED_UP, NUMBERS

# ZEROS of a kernel: what a scale's word has in its upper half.
POINTS, CENTRES = tl.constexpr(1), tl.constexpr(2)


def unpack_ptx(field: int, bits: int, bf16: bool, zeros: bool, seven: bool = False) -> str:
    """Two words of 16 bits, $1, to one field of each less the zero point: two numbers, $0. With zeros $2 is added.
    `seven`: of 8 bits the lower 7, which are all that there are."""
    kind, one = ("bf16x2", "0x3f803f80") if bf16 else ("f16x2", "0x3c003c00")
    if bits == 8 and bf16 and not seven:
        # A byte in the fraction of a float32 is 2^23 + code.
        less = "0f4b000000" if zeros else "0f4b000080"
        made = f"""
            mov.b32 m, 0x4b000000;
            prmt.b32 a, $1, m, 0x744{field};
            prmt.b32 b, $1, m, 0x744{field + 2};
            sub.f32 a, a, {less};
            sub.f32 b, b, {less};
            cvt.rn.bf16x2.f32 a, b, a;"""
        add = "$2" if zeros else ""
    else:
        mask = "0x000f000f" if bits == 4 else "0x007f007f" if seven else "0x00ff00ff"
        magic = "0x43004300" if bf16 else "0x64006400"  # 128 and 1024: the code is added to the fraction
        made = f"shr.b32 a, $1, {bits * field}; lop3.b32 a, a, {mask}, {magic}, 0xea; "
        middles = {(4, True): "0xc308c308", (4, False): "0xe408e408", (8, False): "0xe480e480"}
        middles |= {(7, True): "0xc340c340", (7, False): "0xe440e440"}
        middle = middles[7 if seven else bits, bf16]
        add = "$2" if zeros else "m"
        made += "" if zeros else f"mov.b32 m, {middle};"
    last = f"mov.b32 b, {one}; fma.rn.{kind} $0, a, b, {add};" if add else "mov.b32 $0, a;"
    return "{ .reg .b32 a, b, m; " + made + last + " }"


def unpack_e2m1_ptx(field: int, bf16: bool) -> str:
    """Two words of 16 bits, $1, to one field of each: two numbers, $0.

    Exponent and mantissa go where the type has the lowest bits of its exponent and the highest of its fraction; its own
    bias of the exponent is multiplied away, subnormal numbers among them.
    """
    low, sign = E2M1_BITS[field]
    place, mask, kind, by = (6, 0x01C0, "bf16x2", "0x7e807e80") if bf16 else (9, 0x0E00, "f16x2", "0x74007400")
    to_low, to_sign = place - low, 15 - sign
    made = _shift("a", to_low)
    if to_low == to_sign:
        made += f"and.b32 a, a, 0x{(mask | 0x8000) * 0x10001:08x}; "
    else:
        made += f"and.b32 a, a, 0x{mask * 0x10001:08x}; {_shift('b', to_sign)}lop3.b32 a, b, 0x80008000, a, 0xea; "
    multiplied = f"mov.b32 b, {by}; mov.b32 z, 0x80008000; fma.rn.{kind} $0, a, b, z;"
    return "{ .reg .b32 a, b, z; " + made + multiplied + " }"


def look_up_ptx(fields: int, bf16: bool, numbers: tuple[float, ...]) -> str:
    """Two words of 16 bits, $2, to two fields of each, the lower ones (0) or the higher (1): two numbers of each, $0
    and $1. A byte permute looks four codes up among eight bytes; of 16 numbers there are two such tables of their low
    bytes and two of their high ones, and the codes' highest bits choose between these."""
    bits = torch.tensor(numbers).to(torch.bfloat16 if bf16 else torch.float16).view(torch.int16).tolist()
    low, high = bytes(value & 255 for value in bits), bytes(value >> 8 & 255 for value in bits)
    tables = [int.from_bytes(octets[i : i + 4], "little") for octets in (low, high) for i in range(0, 16, 4)]
    code = f"prmt.b32 t, $2, 0, 0x44{2 + fields}{fields}; and.b32 i, t, 0x7777; shr.b32 t, t, 3; and.b32 t, t, 0x1111; "
    code += "prmt.b32 m, 0xff00, 0, t; "
    for to, four in (("l", tables[:4]), ("h", tables[4:])):
        code += "".join(f"mov.b32 {name}, 0x{table:08x}; " for name, table in zip("abcd", four, strict=True))
        code += f"prmt.b32 a, a, b, i; prmt.b32 c, c, d, i; lop3.b32 {to}, m, c, a, 0xca; "
    return "{ .reg .b32 a, b, c, d, h, i, l, m, t; " + code + "prmt.b32 $0, l, h, 0x6240; prmt.b32 $1, l, h, 0x7351; }"


def _shift(to: str, left: int) -> str:
    return f"mov.b32 {to}, $1; " if left == 0 else f"{'shl' if left > 0 else 'shr'}.b32 {to}, $1, {abs(left)}; "


_PTX = tl.constexpr(
    tuple(
        unpack_ptx(field % (16 // bits), bits, bf16, zeros)
        for bits in (4, 8)
        for bf16 in (False, True)
        for zeros in (False, True)
        for field in range(4)
    )
)
_SEVEN_PTX = tl.constexpr(tuple(unpack_ptx(field, 8, bf16, False, True) for bf16 in (False, True) for field in (0, 1)))
_E2M1_PTX = tl.constexpr(tuple(unpack_e2m1_ptx(field, bf16) for bf16 in (False, True) for field in range(4)))
_E2M1_LOW = tl.constexpr(tuple(low for low, _ in E2M1_BITS))
_E2M1_SIGN = tl.constexpr(tuple(sign for _, sign in E2M1_BITS))


_LOOK_UP_PTX = tl.constexpr(
    tuple(look_up_ptx(fields, bf16, NUMBERS[kind]) for kind in LOOKED_UP for bf16 in (False, True) for fields in (0, 1))
)
_NF4, _FP4 = (tl.constexpr(NUMBERS[kind]) for kind in LOOKED_UP)


@triton.jit
def look_up(words, FIELD: tl.constexpr, CODES: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Words [rows, plane] to the numbers of one field's codes."""
    if INTERPRETED:
        code = (words.to(tl.int32) >> (4 * FIELD)) & 15
        made = tl.zeros(code.shape, tl.float32)
        for i in tl.static_range(16):
            made = tl.where(code == i, _NF4[i] if CODES == "nf4" else _FP4[i], made)
        return made.to(DTYPE)
    else:
        # The compiler finds that two fields are of the same instructions, and keeps one of these.
        PLACE: tl.constexpr = (0 if CODES == "nf4" else 4) + (2 if tl.bfloat16 == DTYPE else 0) + FIELD // 2
        even, odd = tl.inline_asm_elementwise(
            _LOOK_UP_PTX[PLACE], "=r,=r,r", [words], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
        )
        if FIELD % 2 == 0:
            return even.to(DTYPE, bitcast=True)
        return odd.to(DTYPE, bitcast=True)


@triton.jit
def unpack_e2m1(words, FIELD: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Words [rows, plane] to 4-bit floats."""
    if INTERPRETED:
        wide = words.to(tl.int32)
        code = (wide >> _E2M1_LOW[FIELD]) & 7
        exponent, mantissa = code >> 1, code & 1
        halves = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
        negative = (wide >> _E2M1_SIGN[FIELD]) & 1
        return (halves.to(tl.float32) * (0.5 - negative.to(tl.float32))).to(DTYPE)
    else:
        PLACE: tl.constexpr = (4 if tl.bfloat16 == DTYPE else 0) + FIELD
        made = tl.inline_asm_elementwise(_E2M1_PTX[PLACE], "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
        return made.to(DTYPE, bitcast=True)


@triton.jit
def unpack(words, neg_zero, FIELD: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr, DTYPE: tl.constexpr,
           ZEROS: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Words [rows, plane] to codes less their zero points; neg_zero [rows, 1]: minus (zero point + offset)."""
    BF16: tl.constexpr = tl.bfloat16 == DTYPE
    if CODES == "e2m1" or CODES == "mxfp4" or CODES == "nvfp4":
        return unpack_e2m1(words, FIELD, DTYPE, INTERPRETED)
    elif CODES == "nf4" or CODES == "fp4":
        return look_up(words, FIELD, CODES, DTYPE, INTERPRETED)
    elif INTERPRETED:
        code = ((words.to(tl.int32) >> (BITS * FIELD)) & ((1 << BITS) - 1)).to(tl.float32)
        if ZEROS:
            added: tl.constexpr = (128 if BITS == 4 else 0) if BF16 else 1024
            return (code + added + neg_zero.to(tl.float32)).to(DTYPE)
        return (code - (64 if CODES == "int7" else 1 << (BITS - 1))).to(DTYPE)
    elif CODES == "int7":
        SEVEN: tl.constexpr = (2 if BF16 else 0) + FIELD
        made = tl.inline_asm_elementwise(_SEVEN_PTX[SEVEN], "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
        return made.to(DTYPE, bitcast=True)
    else:
        PLACE: tl.constexpr = (0 if BITS == 4 else 16) + (8 if BF16 else 0) + FIELD
        if ZEROS:
            added_to = tl.broadcast_to(neg_zero, words.shape)
            made = tl.inline_asm_elementwise(
                _PTX[PLACE + 4], "=r,r,r", [words, added_to], dtype=tl.int16, is_pure=True, pack=2
            )
        else:
            made = tl.inline_asm_elementwise(_PTX[PLACE], "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
        return made.to(DTYPE, bitcast=True)


@triton.jit
def scale_pairs(values, scale, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Values [rows, plane] times scales [rows], two at a time."""
    by = scale.to(DTYPE)[:, None]
    if INTERPRETED:
        return (values.to(tl.float32) * by.to(tl.float32)).to(DTYPE)
    else:
        pairs = [values, tl.broadcast_to(by, values.shape)]
        if tl.bfloat16 == DTYPE:
            made = tl.inline_asm_elementwise(
                "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
                "=r,r,r", pairs, dtype=tl.int16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            made = tl.inline_asm_elementwise(
                "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", pairs, dtype=tl.int16, is_pure=True, pack=2
            )
        return made.to(DTYPE, bitcast=True)


@triton.jit
def scale_and_add_pairs(values, scale, added, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Values [rows, plane] times scales [rows] plus added [rows, 1], rounded once, two at a time."""
    by = scale.to(DTYPE)[:, None]
    if INTERPRETED:
        return (values.to(tl.float32) * by.to(tl.float32) + added.to(tl.float32)).to(DTYPE)
    else:
        triples = [values, tl.broadcast_to(by, values.shape), tl.broadcast_to(added, values.shape)]
        if tl.bfloat16 == DTYPE:
            made = tl.inline_asm_elementwise(
                "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", triples, dtype=tl.int16, is_pure=True, pack=2
            )
        else:
            made = tl.inline_asm_elementwise(
                "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", triples, dtype=tl.int16, is_pure=True, pack=2
            )
        return made.to(DTYPE, bitcast=True)


@triton.jit
def low_half(word, BF16: tl.constexpr):
    """The number in the lower 16 bits, as float32."""
    if BF16:
        return (word << 16).to(tl.float32, bitcast=True)
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word, BF16: tl.constexpr):
    if BF16:
        return (word & -65536).to(tl.float32, bitcast=True)
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def byte_scale(word, FIELD: tl.constexpr, CODES: tl.constexpr):
    """A field's scale in a word of four bytes, as float32: an exponent, or e4m3 in the same place but for the bias."""
    if CODES == "mxfp4":
        return (((word >> (8 * FIELD)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    return (((word >> (8 * FIELD)) & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def scale_word(words, FIELD: tl.constexpr, COUNT: tl.constexpr, ZEROS: tl.constexpr):
    """The scale words of one field, [outputs], from those of a chunk, [outputs, COUNT]."""
    # Loaded together and split in registers: a load for each would be one of 4 bytes.
    INDEX: tl.constexpr = FIELD if ZEROS else FIELD // 2
    if COUNT == 1:
        return tl.reshape(words, [words.shape[0]])
    elif COUNT == 2:
        first, second = tl.split(words)
        if INDEX == 0:
            return first
        return second
    else:
        even, odd = tl.split(tl.reshape(words, [words.shape[0], 2, 2]))
        if INDEX % 2 == 0:
            first, second = tl.split(even)
        else:
            first, second = tl.split(odd)
        if INDEX < 2:
            return first
        return second
