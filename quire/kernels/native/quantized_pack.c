/* Weights into panels: from the blocks of a GGUF file, or quantized first. See quantized.h for the layout.
 * Runs in one thread: the loader reads several tensors at a time. */

#include "quantized.h"

/* 0: there is no such format, or k is not a multiple of its blocks. */
int64_t quire_quantized_panel_bytes(int format, int64_t k) {
    return format_takes(format, k) ? panel_bytes_of(format, k) : 0;
}

/* The q of a group of 32, and its scales: d and m (m unused where symmetric); K formats give 6-bit ones. */
typedef struct {
    uint8_t q[GROUP];
    uint8_t scales[2];
} Unpacked;

static void unpack_k(int format, const uint8_t *block, int group, Unpacked *to) {
    if (format == Q6_K) {
        const uint8_t *low = block + group / 4 * 64 + group % 2 * 32, *high = block + 128 + group / 4 * 32;
        int run = group % 4;
        for (int i = 0; i < GROUP; i++)
            to->q[i] = (uint8_t)((low[i] >> (run < 2 ? 0 : 4) & 15) | (high[i] >> 2 * run & 3) << 4);
        memcpy(to->scales, block + 192 + 2 * group, 2);
        return;
    }
    const uint8_t *s = block + 4, *q = block + (format == Q5_K ? 48 : 16) + group / 2 * 32;
    if (group < 4) {
        to->scales[0] = s[group] & 63;
        to->scales[1] = s[group + 4] & 63;
    } else {
        to->scales[0] = (uint8_t)((s[group + 4] & 15) | s[group - 4] >> 6 << 4);
        to->scales[1] = (uint8_t)(s[group + 4] >> 4 | s[group] >> 6 << 4);
    }
    for (int i = 0; i < GROUP; i++) to->q[i] = q[i] >> 4 * (group % 2) & 15;
    if (format == Q5_K)
        for (int i = 0; i < GROUP; i++) to->q[i] |= (uint8_t)((block[16 + i] >> group & 1) << 4);
}

/* Two halves before 4 bytes of fifth bits (one half where symmetric), then 16 bytes of nibbles. */
static void unpack_q5(int format, const uint8_t *block, Unpacked *to) {
    const uint8_t *q = block + (format == Q5_1 ? 8 : 6);
    uint32_t high;
    memcpy(&high, q - 4, 4);
    for (int i = 0; i < GROUP / 2; i++) {
        to->q[i] = (uint8_t)((q[i] & 15) | (high >> i & 1) << 4);
        to->q[i + 16] = (uint8_t)(q[i] >> 4 | (high >> (i + 16) & 1) << 4);
    }
}

/* One output's q into the panel's group. */
static void put(int bits, uint8_t *group, int lane, const uint8_t *q) {
    uint8_t *to = group + lane * 4;
    for (int j = 0; j < QUADS / 2; j++)
        for (int b = 0; b < 4; b++)
            to[j * 64 + b] = (uint8_t)((q[4 * j + b] & 15) | (q[16 + 4 * j + b] & 15) << 4);
    for (int b = 0; b < 4; b++) {
        unsigned plane = 0;
        for (int j = 0; j < QUADS; j++) plane |= (unsigned)(q[4 * j + b] >> 4) << j * (bits - 4);
        if (bits >= 5) to[256 + b] = (uint8_t)plane;
        if (bits == 6) to[320 + b] = (uint8_t)(plane >> 8);
    }
}

/* Formats of 32 whose bytes are in the right order already: four inputs of an output stay together. */
static void put_quads(uint8_t *group, int lane, const uint8_t *q, int quads, uint32_t flip) {
    for (int j = 0; j < quads; j++) {
        uint32_t four;
        memcpy(&four, q + 4 * j, 4);
        four ^= flip;
        memcpy(group + j * 64 + lane * 4, &four, 4);
    }
}

static void put_group(int format, const uint8_t *block, uint8_t *group, int lane) {
    Format f = FORMATS[format];
    uint8_t *scales = group + quant_bytes(f.bits);
    memcpy(scales + 2 * lane, block, 2);
    if (f.kind == AFFINE) memcpy(scales + 2 * (LANES + lane), block + 2, 2);
    if (format == Q8_0) put_quads(group, lane, block + 2, QUADS, 0x80808080);
    else if (f.bits == 4) put_quads(group, lane, block + f.bytes - 16, QUADS / 2, 0);
    else {
        Unpacked u;
        unpack_q5(format, block, &u);
        put(5, group, lane, u.q);
    }
}

static void put_k_block(int format, const uint8_t *block, uint8_t *shared, int lane) {
    Format f = FORMATS[format];
    int64_t bytes = quant_bytes(f.bits);
    memcpy(shared + 2 * lane, block + (format == Q6_K ? 208 : 0), 2);
    if (f.kind == AFFINE) memcpy(shared + 2 * (LANES + lane), block + 2, 2);
    uint8_t *group = shared + shared_bytes(f.kind, 1);
    for (int g = 0; g < SUPER; g++, group += bytes + scale_bytes(f.kind, 1)) {
        Unpacked u;
        unpack_k(format, block, g, &u);
        put(f.bits, group, lane, u.q);
        group[bytes + lane] = u.scales[0];
        group[bytes + LANES + lane] = u.scales[1];
    }
}

/* Rows first .. first + n of a file's weight, `stride` bytes apart, into zeroed panels. half > 0: the file has rotary pairs
 * next to each other, heads of 2 * half rows; here all first ones of a head come before all second ones. */
int quire_pack_quantized(int format, const uint8_t *blocks, uint8_t *packed, int64_t n, int64_t k, int64_t stride,
                         int64_t first, int64_t half) {
    if (n < 0 || first < 0 || half < 0 || !format_takes(format, k)) return BAD_SIZE;
    Format f = FORMATS[format];
    int64_t panel_bytes = panel_bytes_of(format, k), per_panel = k / f.elements;
    int64_t step = panel_bytes / per_panel;
    for (int64_t at = 0; at < n; at += LANES) {
        const uint8_t *rows[LANES];
        int lanes = n - at < LANES ? (int)(n - at) : LANES;
        for (int lane = 0; lane < lanes; lane++) {
            int64_t row = first + at + lane;
            if (half) row = row / (2 * half) * (2 * half) + row % half * 2 + row / half % 2;
            rows[lane] = blocks + row * stride;
        }
        uint8_t *panel = packed + at / LANES * panel_bytes;
        for (int64_t b = 0; b < per_panel; b++)
            for (int lane = 0; lane < lanes; lane++) {
                if (f.k_format) put_k_block(format, rows[lane] + b * f.bytes, panel + b * step, lane);
                else put_group(format, rows[lane] + b * f.bytes, panel + b * step, lane);
            }
    }
    return DONE;
}

/* weight [n, k] -> blocks of Q8_0 or Q4_1. The scales are rounded first, so that q fits what is stored. */
int quire_quantize_weight(int format, const void *weight, uint8_t *blocks, int64_t n, int64_t k, int type) {
    if ((format != Q8_0 && format != Q4_1) || n < 0 || !format_takes(format, k)) return BAD_SIZE;
    for (int64_t g = 0; g < n * k / GROUP; g++) {
        uint8_t *to = blocks + g * FORMATS[format].bytes;
        float w[GROUP], low = INFINITY, high = -INFINITY;
        for (int i = 0; i < GROUP; i++) {
            w[i] = load(weight, g * GROUP + i, type);
            low = w[i] < low ? w[i] : low; /* fminf here breaks gcc 12 for ARM */
            high = w[i] > high ? w[i] : high;
        }
        uint16_t d = to_half(format == Q8_0 ? fmaxf(-low, high) / 127 : (high - low) / 15), m = to_half(low);
        float inverse = from_half(d) > 0 ? 1 / from_half(d) : 0, start = from_half(m);
        memcpy(to, &d, 2);
        if (format == Q8_0) {
            for (int i = 0; i < GROUP; i++)
                to[2 + i] = (uint8_t)(int8_t)lrintf(fminf(fmaxf(w[i] * inverse, -127), 127));
            continue;
        }
        memcpy(to + 2, &m, 2);
        uint8_t q[GROUP];
        for (int i = 0; i < GROUP; i++) q[i] = (uint8_t)lrintf(fminf(fmaxf((w[i] - start) * inverse, 0), 15));
        for (int i = 0; i < GROUP / 2; i++) to[4 + i] = (uint8_t)(q[i] | q[i + 16] << 4);
    }
    return DONE;
}

