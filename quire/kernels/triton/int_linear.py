"""y = x W^T with W in 4 or 8 bits (layout: quire/kernels/int_linear.py), for up to some hundred rows.

Words go through shared memory into the registers of the left operand of a matrix instruction and become numbers there:
for 4 bits a shift, a mask and a sum for two weights, so that reading W is the limit. Each field of the words is a
product of its own with the inputs it holds, whose sum is scaled once per output: the scales never touch the weights.
Codes of 4-bit floats become numbers in the same place; the flag CODES says which kind they are: "mxfp4" and "nvfp4" are
e2m1 with scales of bytes. Where a plane has several groups, few rows are multiplied group by group nevertheless in one
product: a row is several columns, each with the inputs of one group and zeros, of which the smallest instruction has
eight anyway. For more rows a step reads the inputs of one group.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.int_linear import E2M1_BITS, LOOKED_UP, NUMBERS, PANEL, PackedIntWeight
from quire.kernels.int_table import MAX_BLOCK_M, MIN_BLOCK_M, IntConfig
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.skinny_table import MAX_FUSED_ROWS
from quire.kernels.triton.skinny_linear import COUNTERS, WORKSPACE_FLOATS, SplitWorkspace, epilogue

MAX_SHARED = 220 << 10
PREFETCHED = 4  # chunks that a program prefetches before the kernel before has ended
NORM_BLOCK = 4096  # inputs that a program squares at a time
# ZEROS of a kernel: what a scale's word has in its upper half.
POINTS, CENTRES = tl.constexpr(1), tl.constexpr(2)
MAX_COLUMNS = 32  # of few rows times groups of a plane


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
def _scaled_dot(
    acc, tile, right, word, channel, FIELD: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr,
    DTYPE: tl.constexpr, ZEROS: tl.constexpr, PER_CHANNEL: tl.constexpr, SCALE_BF16: tl.constexpr,
    PRESCALED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """acc plus the product with one field; `word` [rows] has its scale, `channel` [rows] the output's. With several
    groups in a plane `word` is [rows, columns]."""
    of = channel if PER_CHANNEL else word
    upper = (of >> 16).to(tl.int16).to(DTYPE, bitcast=True)[:, None] if ZEROS else tile
    left = unpack(tile, upper, FIELD, BITS, CODES, DTYPE, ZEROS == POINTS, INTERPRETED)
    if ZEROS == CENTRES:
        return tl.dot(scale_and_add_pairs(left, low_half(word, SCALE_BF16), upper, DTYPE, INTERPRETED), right, acc)
    if PER_CHANNEL:
        made = tl.dot(left, right, acc)
    elif len(word.shape) == 2:
        made = acc + tl.dot(left, right) * byte_scale(word, FIELD, CODES)
    else:
        if CODES == "mxfp4" or CODES == "nvfp4":
            scale = byte_scale(word, FIELD, CODES)
        else:
            scale = low_half(word, SCALE_BF16) if ZEROS or FIELD % 2 == 0 else high_half(word, SCALE_BF16)
        if PRESCALED:
            made = tl.dot(scale_pairs(left, scale, DTYPE, INTERPRETED), right, acc)
        else:
            made = acc + tl.dot(left, right) * scale[:, None]
    return made


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


@triton.jit
def multiply(
    x_rows,  # [1, BLOCK_M] pointers to rows of x
    in_m,  # [1, BLOCK_M]
    gain,  # [K] of an RMSNorm of x, without its factor
    words,  # [BLOCK_N, 1] pointers to the outputs' first words
    scales,  # [BLOCK_N] pointers to the outputs' first scales
    factors,  # [BLOCK_N] pointers to the outputs' factors, with FACTORS
    up_words,  # with UP: from a word of the first half to that of the second,
    up_scales,  # from a scale,
    up_factors,  # and from a factor
    begin,  # chunks
    end,
    K,
    scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    COUNT: tl.constexpr,
    CODES: tl.constexpr,
    ZEROS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SCALE_BF16: tl.constexpr,
    FACTORS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    UP: tl.constexpr,
    SUB: tl.constexpr,  # inputs of a plane that are read at a time: with many rows these take most of the space
    PRESCALED: tl.constexpr,  # scales on the weights: rounds once more, but with many rows there are fewer of them
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The products with outputs and, with UP, with those of the second half: [BLOCK_N, BLOCK_M] float32 each."""
    FIELDS: tl.constexpr = 16 // BITS
    BYTES: tl.constexpr = CODES == "mxfp4" or CODES == "nvfp4"
    GROUP: tl.constexpr = PLANE // COUNT if BYTES else PLANE
    COLUMNS: tl.constexpr = BYTES and COUNT > 1 and SUB == PLANE
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    STEPS: tl.constexpr = PLANE // SUB
    j = tl.arange(0, SUB)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    channel = tl.load(scales) if PER_CHANNEL else tl.zeros([BLOCK_N], tl.int32)
    channel_up = tl.load(scales + up_scales) if PER_CHANNEL and UP else channel
    word, word_up = channel, channel
    keep = in_m
    if COLUMNS:
        word = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
        word_up = word
        part = tl.arange(0, BLOCK_M) % COUNT
        keep = in_m & ((j // GROUP)[:, None] == part[None, :])
    for step in tl.range(begin * STEPS, end * STEPS, num_stages=STAGES):
        chunk = step // STEPS
        inputs = (step % STEPS) * SUB + j
        at = words + chunk * (16 * PLANE) + inputs[None, :]
        tile = tl.load(at, eviction_policy="evict_first")
        tile_up = tl.load(at + up_words, eviction_policy="evict_first") if UP else tile
        if BYTES:
            if COLUMNS:
                at_scale = scales[:, None] + chunk * scale_stride + part[None, :]
            else:
                at_scale = scales + chunk * scale_stride + (step % STEPS) * SUB // GROUP
            word = tl.load(at_scale)
            word_up = tl.load(at_scale + up_scales) if UP else word
        elif not PER_CHANNEL:
            at_scale = scales[:, None] + chunk * scale_stride + tl.arange(0, COUNT)[None, :]
            some_scales = tl.load(at_scale)
            some_scales_up = tl.load(at_scale + up_scales) if UP else some_scales
        for field in tl.static_range(FIELDS):
            plane = chunk * FIELDS + field
            k = plane * PLANE + inputs
            if EVEN_K:
                right = tl.load(x_rows + k[:, None], mask=keep, other=0.0)
            else:
                right = tl.load(x_rows + k[:, None], mask=keep & (k < K)[:, None], other=0.0)
            if HAS_NORM:
                by = tl.load(gain + k) if EVEN_K else tl.load(gain + k, mask=k < K, other=0.0)
                right = (right.to(tl.float32) * by.to(tl.float32)[:, None]).to(DTYPE)
            if not PER_CHANNEL and not BYTES:
                word = scale_word(some_scales, field, COUNT, ZEROS)
                word_up = scale_word(some_scales_up, field, COUNT, ZEROS) if UP else word
            acc = _scaled_dot(
                acc, tile, right, word, channel, field, BITS, CODES, DTYPE, ZEROS, PER_CHANNEL, SCALE_BF16, PRESCALED,
                INTERPRETED,
            )  # fmt: skip
            if UP:
                acc_up = _scaled_dot(
                    acc_up, tile_up, right, word_up, channel_up, field, BITS, CODES, DTYPE, ZEROS, PER_CHANNEL,
                    SCALE_BF16, PRESCALED, INTERPRETED,
                )  # fmt: skip
    if PER_CHANNEL:
        acc *= low_half(channel, SCALE_BF16)[:, None]
        if UP:
            acc_up *= low_half(channel_up, SCALE_BF16)[:, None]
    if FACTORS:
        acc *= tl.load(factors)[:, None]
        if UP:
            acc_up *= tl.load(factors + up_factors)[:, None]
    return acc, acc_up


@triton.jit
def word_rows(words, n, chunks, PLANE: tl.constexpr):
    """Pointers to the first words of outputs n, [len(n), 1]."""
    return words + ((n // 16).to(tl.int64) * (chunks * 16 * PLANE) + (n % 16) * PLANE)[:, None]


@triton.jit
def prefetch(rows, begin, chunks, PLANE: tl.constexpr, CHUNKS: tl.constexpr):
    """Prefetch the first words of each output of a tile; the pieces of a chunk are 16 * PLANE words apart."""
    LINES: tl.constexpr = PLANE // 64 if PLANE > 64 else 1
    line = tl.arange(0, LINES) * 64
    for chunk in tl.static_range(CHUNKS):
        at = rows + tl.minimum(begin + chunk, chunks - 1) * (16 * PLANE) + line[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def inverse_norms(x, first, rows, K, x_stride, eps, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The RMSNorm's factor of each row, [BLOCK_M], for rows `first` to `first + ROWS`."""
    m = tl.arange(0, BLOCK_M)
    factors = tl.zeros([BLOCK_M], tl.float32)
    for row in tl.static_range(ROWS):
        at = x + tl.minimum(first + row, rows - 1).to(tl.int64) * x_stride
        squares = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            values = tl.load(at + k, mask=k < K, other=0.0).to(tl.float32)
            squares += values * values
        factors = tl.where(m == row, tl.rsqrt(tl.sum(squares, 0) / K + eps), factors)
    return factors


@triton.jit
def share_sums(acc, acc_up, partial, arrived, tile, split, splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               UP: tl.constexpr):  # fmt: skip
    """Adds up the splits' sums of a tile. Returns whether this program came last and has them."""
    HALVES: tl.constexpr = 2 if UP else 1
    SIZE: tl.constexpr = BLOCK_N * BLOCK_M
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    sums = partial + tile * splits * (HALVES * SIZE) + place
    tl.store(sums + split * (HALVES * SIZE), acc)
    if UP:
        tl.store(sums + split * (HALVES * SIZE) + SIZE, acc_up)
    # Every thread's part must be written before one thread counts it as arrived.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
    if is_last:
        tl.store(arrived + tile, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = acc
        for other in tl.range(splits):  # in order, whichever program came last: the same bits every time
            acc += tl.load(sums + other * (HALVES * SIZE), cache_modifier=".cg")
            if UP:
                acc_up += tl.load(sums + other * (HALVES * SIZE) + SIZE, cache_modifier=".cg")
    return acc, acc_up, is_last


@triton.jit(do_not_specialize=["rows", "splits"])
def _linear_kernel(
    x,  # [rows, K]
    words,  # [N / 16, chunks, 16, PLANE], with SILU 2 * N outputs
    scales,  # [chunks or 1, N, COUNT]
    factors,  # [N] float32
    y,  # [rows, N]
    bias,
    residual,
    gain,
    partial,  # [tiles, splits, halves, BLOCK_N, BLOCK_M] float32
    arrived,  # [tiles] int32: zero before and after
    rows,
    splits,
    K,
    N,
    chunks,
    scale_stride,
    x_stride,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,  # with HAS_NORM: the rows, rounded up to a power of two
    SPLIT: tl.constexpr,  # whether splits > 1
    NORM_BLOCK: tl.constexpr,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    COUNT: tl.constexpr,
    CODES: tl.constexpr,
    ZEROS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SCALE_BF16: tl.constexpr,
    FACTORS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SILU: tl.constexpr,
    SUB: tl.constexpr,
    PRESCALED: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs of the same weights are neighbours: the second one hits the cache.
    m_tile, n_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Columns of a row, each of one group of a plane; see `multiply`.
    EACH: tl.constexpr = COUNT if (CODES == "mxfp4" or CODES == "nvfp4") and SUB == PLANE else 1
    TILE_M: tl.constexpr = BLOCK_M // EACH
    m = m_tile * TILE_M + tl.arange(0, TILE_M)
    of_column = m if EACH == 1 else m_tile * TILE_M + tl.arange(0, BLOCK_M) // EACH
    steps = tl.cdiv(chunks, splits)
    begin = split * steps
    end = tl.minimum(begin + steps, chunks)
    # Columns past the end read the last one again: cheaper than a mask, and never stored.
    inside_n = tl.minimum(n, N - 1)
    w_rows = word_rows(words, inside_n, chunks, PLANE)
    up_words = (N // 16).to(tl.int64) * (chunks * 16 * PLANE)
    if PDL:
        gdc_launch_dependents()
        prefetch(w_rows, begin, chunks, PLANE, PREFETCHED)
        if SILU:
            prefetch(w_rows + up_words, begin, chunks, PLANE, PREFETCHED)
        gdc_wait()
    x_rows = x + tl.minimum(of_column, rows - 1).to(tl.int64)[None, :] * x_stride
    acc, acc_up = multiply(
        x_rows, (of_column < rows)[None, :], gain, w_rows, scales + inside_n * COUNT,
        factors + inside_n if FACTORS else None, up_words, N * COUNT, N, begin, end, K, scale_stride,
        BLOCK_M, BLOCK_N, PLANE, BITS, COUNT, CODES, ZEROS, PER_CHANNEL, SCALE_BF16, FACTORS, EVEN_K, HAS_NORM, SILU,
        SUB, PRESCALED, STAGES, INTERPRETED,
    )  # fmt: skip
    if EACH > 1:
        acc = tl.sum(tl.reshape(acc, [BLOCK_N, TILE_M, EACH]), 2)
        acc_up = tl.sum(tl.reshape(acc_up, [BLOCK_N, TILE_M, EACH]), 2) if SILU else acc
    if SPLIT:
        tile = n_tile * tl.num_programs(0) + m_tile
        acc, acc_up, is_last = share_sums(acc, acc_up, partial, arrived, tile, split, splits, TILE_M, BLOCK_N, SILU)
        if not is_last:
            return
    if HAS_NORM:
        # One number per row, so it is applied to the sum: after the loop, which need not wait for it.
        factor = inverse_norms(x, m_tile * TILE_M, rows, K, x_stride, eps, TILE_M, ROWS, NORM_BLOCK)[None, :]
        acc *= factor
        acc_up *= factor
    epilogue(
        acc, acc_up, n[:, None], m[None, :], (m < rows)[None, :], y, bias, residual, None, None, N,
        HAS_BIAS, HAS_RESIDUAL, False, False, SILU,
    )  # fmt: skip


def layout_flags(w: PackedIntWeight) -> dict[str, Any]:
    """Arguments of a kernel that describe how the weight is packed."""
    return {
        "PLANE": w.plane,
        "BITS": w.bits,
        "COUNT": w.scales.shape[-1],
        "CODES": {torch.uint8: "mxfp4", torch.float8_e4m3fn: "nvfp4"}.get(w.scale_dtype, w.kind),
        "ZEROS": CENTRES.value if w.has_centres else POINTS.value if w.has_zeros else 0,
        "PER_CHANNEL": w.per_channel,
        "SCALE_BF16": w.scale_dtype is torch.bfloat16,
        "FACTORS": w.factors is not None,
        "EVEN_K": w.inputs == w.num_chunks * w.fields * w.plane,
        "INTERPRETED": INTERPRETED,
    }


def stages_for(
    w: PackedIntWeight, config_stages: int, block_n: int, block_m: int, halves: int, sub: int | None = None
) -> int:
    """As many of the config's as shared memory holds."""
    scales = block_m if w.parts > 1 and (sub or w.plane) == w.plane else w.fields
    step = (halves * block_n + w.fields * block_m) * (sub or w.plane) * 2 + halves * scales * block_n * 4
    return max(1, min(config_stages, MAX_SHARED // step))


def int_linear(
    x: torch.Tensor,
    weight: PackedIntWeight,
    config: IntConfig,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: RMSNormParams | None,
    silu: bool,
    pdl: bool,
) -> torch.Tensor:
    rows, k = x.shape
    n = weight.outputs // 2 if silu else weight.outputs
    assert k == weight.inputs and x.dtype is weight.dtype and (not silu or n % PANEL == 0)
    assert norm is None or rows <= MAX_FUSED_ROWS
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    block_m = config.block_m or min(MAX_BLOCK_M, triton.next_power_of_2(max(rows, MIN_BLOCK_M)))
    halves = 2 if silu else 1
    sub, prescaled, each = min(config.sub or weight.plane, weight.plane), config.prescaled, 1
    if weight.parts > 1:
        if weight.parts * triton.next_power_of_2(rows) <= MAX_COLUMNS:
            sub, prescaled, each = weight.plane, False, weight.parts
            block_m = max(MIN_BLOCK_M, each * triton.next_power_of_2(rows))
        else:
            sub = min(sub, weight.plane // weight.parts)
    stages = stages_for(weight, config.stages, config.block_n, block_m, halves, sub)
    grid = (triton.cdiv(rows, block_m // each), triton.cdiv(n, config.block_n), config.splits)
    space = SplitWorkspace.of(x.device)
    if config.splits > 1:
        tiles = grid[0] * grid[1]
        needed = tiles * config.splits * halves * config.block_n * (block_m // each)
        if needed > WORKSPACE_FLOATS or tiles > COUNTERS:
            raise ValueError(f"{config} needs {needed} floats for {rows} rows of {n}; there are {WORKSPACE_FLOATS}")
    gain, eps = norm if norm is not None else (None, 0.0)
    chunks = weight.num_chunks
    _linear_kernel[grid](
        x, weight.words, weight.scales, weight.factors, y, bias, residual, gain, space.partial, space.arrived,
        rows, config.splits, k, n, chunks, weight.scales.stride(-3), x.stride(0), eps,
        BLOCK_M=block_m, BLOCK_N=config.block_n, ROWS=triton.next_power_of_2(rows) if norm is not None else 1,
        SPLIT=config.splits > 1, NORM_BLOCK=min(NORM_BLOCK, triton.next_power_of_2(k)),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None, SILU=silu,
        SUB=sub, PRESCALED=prescaled, STAGES=stages,
        PREFETCHED=min(PREFETCHED, chunks // config.splits) if pdl else 0, PDL=pdl,
        num_warps=config.warps, num_stages=stages, **layout_flags(weight), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return y
