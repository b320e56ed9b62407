/* A step's calls, noted with their arguments as Python would make them, made without it for as many tokens as there are. */

#include "replay.h"
#include "vectors.h"
#include "bf16.h"

int quire_rms_norm(const void *, void *, const void *, void *, int64_t, int64_t, int64_t, float, int);
int quire_layer_norm(const void *, void *, const void *, const void *, void *, int64_t, int64_t, float, int);
int quire_add(const void *, const void *, const int64_t *, void *, int64_t, int64_t, int);
int quire_activate(const void *, void *, int64_t, int64_t, int, int, int);
int quire_rope_and_write(const void *, void *, void *, const void *, const void *, float, const void *, const int64_t *,
                         const int64_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float *, int64_t, int);
int quire_linear(const bf16 *, const bf16 *, const bf16 *, bf16 *, int64_t, int64_t, int64_t);
int quire_linear_amx(const bf16 *, const bf16 *, const bf16 *, bf16 *, int64_t, int64_t, int64_t);
int quire_quantized_linear(const void *, const int64_t *, int64_t, const void *, void *, int64_t, int64_t, int64_t, int,
                           int);
int quire_attention(const void *, void *, const void *, const int64_t *, const int32_t *, const int32_t *,
                    const int32_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    float, float, const float *, const float *, float *, int64_t, const float *, int64_t, int, int);
int quire_route(const void *, const float *, float *, int32_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                float, float, int, int, int, int, int);
int quire_moe(const bf16 *, const bf16 *, const bf16 *, const bf16 *, const bf16 *, const float *, const int32_t *,
              int32_t *, bf16 *, bf16 *, bf16 *, bf16 *, int64_t, int64_t, int64_t, int64_t, int64_t, int, int);
int quire_add_low_rank(const void *, const int32_t *, const int32_t *, const void *, const void *, float *, void *,
                       int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int);
int quire_all_reduce(void *, void *, int64_t, int64_t, int);
int quire_encoder_linear(const void *, const void *, const void *, void *, const void *, const float *, const float *,
                         int64_t, int64_t, int64_t, float, int, int);
int quire_encoder_attention(const void *, void *, const int32_t *, const float *, const void *, const int64_t *,
                            const float *, const float *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, float, float, int);
int quire_latent_write(bf16 *, const bf16 *, const float *, const bf16 *, const int64_t *, const int64_t *, bf16 *,
                       int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int);
int quire_latent_attention(const bf16 *, const bf16 *, const bf16 *, const bf16 *, const int64_t *, const int32_t *,
                           const int32_t *, const int32_t *, bf16 *, bf16 *, float *, bf16 *, int64_t, int64_t, int64_t,
                           int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int);

/* Calls noted for a step of `size` tokens, made for one of `tokens` tokens in `rows` rows. What counts rows of numbers is a
 * multiple of the tokens: of heads, where each has a norm. The first call that is not DONE is the last. */
int quire_replay(const Call *calls, int64_t count, int64_t size, int64_t tokens, int64_t rows, int64_t shared) {
#define OF_TOKENS(argument) ((argument).i / size * tokens)
    int status = tokens < 0 || tokens > size || rows < 0 || rows > size ? BAD_SIZE : DONE;
    for (const Call *c = calls; c < calls + count && status == DONE; c++) {
        const Argument *a = c->a;
        switch (c->kind) {
        default: status = BAD_SIZE; break;
        case RMS_NORM:
            status = quire_rms_norm(a[0].p, a[1].p, a[2].p, a[3].p, OF_TOKENS(a[4]), a[5].i, a[6].i, a[7].f, a[8].i);
            break;
        case LAYER_NORM:
            status = quire_layer_norm(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, OF_TOKENS(a[5]), a[6].i, a[7].f, a[8].i);
            break;
        case ADD: status = quire_add(a[0].p, a[1].p, a[2].p, a[3].p, OF_TOKENS(a[4]), a[5].i, a[6].i); break;
        case ACTIVATE: status = quire_activate(a[0].p, a[1].p, OF_TOKENS(a[2]), a[3].i, a[4].i, a[5].i, a[6].i); break;
        case ADD_LOW_RANK:
            status = quire_add_low_rank(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, OF_TOKENS(a[7]),
                                        a[8].i, a[9].i, a[10].i, a[11].i, a[12].i, a[13].i, a[14].i);
            break;
        case ALL_REDUCE: status = quire_all_reduce(a[0].p, a[1].p, OF_TOKENS(a[2]), a[3].i, a[4].i); break;
        case ROPE_AND_WRITE:
            status = quire_rope_and_write(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].f, a[6].p, a[7].p, a[8].p,
                                          OF_TOKENS(a[9]), a[10].i, a[11].i, a[12].i, a[13].i, a[14].i, a[15].p,
                                          a[16].i, a[17].i);
            break;
        case LINEAR: status = quire_linear(a[0].p, a[1].p, a[2].p, a[3].p, OF_TOKENS(a[4]), a[5].i, a[6].i); break;
        case LINEAR_AMX:
            status = quire_linear_amx(a[0].p, a[1].p, a[2].p, a[3].p, OF_TOKENS(a[4]), a[5].i, a[6].i);
            break;
        case QUANTIZED_LINEAR:
            status = quire_quantized_linear(a[0].p, a[1].p, a[2].i, a[3].p, a[4].p, OF_TOKENS(a[5]), a[6].i, a[7].i,
                                            a[8].i, a[9].i);
            break;
        case ATTENTION: /* with a window (14) nothing is shared */
            status = quire_attention(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, OF_TOKENS(a[7]), a[8].i,
                                     rows, a[10].i, a[11].i, a[12].i, a[13].i, a[14].i, a[14].i ? 0 : shared, a[16].f,
                                     a[17].f, a[18].p, a[19].p, a[20].p, a[21].i, a[22].p, a[23].i, a[24].i,
                                     a[25].i);
            break;
#ifdef HAVE_BF16_VECTORS
        case ENCODER_LINEAR:
            status = quire_encoder_linear(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, OF_TOKENS(a[7]), a[8].i,
                                          a[9].i, a[10].f, a[11].i, a[12].i);
            break;
        case ENCODER_ATTENTION:
            status = quire_encoder_attention(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p,
                                             OF_TOKENS(a[8]), rows, a[10].i, a[11].i, a[12].i, a[13].i, a[14].i, a[15].i,
                                             a[16].f, a[17].f, a[18].i);
            break;
#endif
        case LATENT_WRITE:
            status = quire_latent_write(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, OF_TOKENS(a[7]), a[8].i,
                                        a[9].i, a[10].i, a[11].i, a[12].i, a[13].i, a[14].f, a[15].i);
            break;
        case LATENT_ATTENTION:
            status = quire_latent_attention(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].p,
                                            a[9].p, a[10].p, a[11].p, OF_TOKENS(a[12]), a[13].i, a[14].i, rows, a[16].i,
                                            a[17].i, a[18].i, a[19].i, a[20].i, a[21].i, a[22].i, a[23].f, a[24].i);
            break;
        case ROUTE:
            status = quire_route(a[0].p, a[1].p, a[2].p, a[3].p, OF_TOKENS(a[4]), a[5].i, a[6].i, a[7].i, a[8].i, a[9].i,
                                 a[10].f, a[11].f, a[12].i, a[13].i, a[14].i, a[15].i, a[16].i);
            break;
        case MOE:
            status = quire_moe(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].p, a[9].p, a[10].p,
                               a[11].p, OF_TOKENS(a[12]), a[13].i, a[14].i, a[15].i, a[16].i, a[17].i, a[18].i);
            break;
        }
    }
    return status;
}
