/* AMX instructions on a processor without them: each raises SIGILL, is decoded, and done by the software version. So
 * tests run the machine code that an AMX processor will run. */

#define _GNU_SOURCE
#define QUIRE_EMULATE_AMX
#include <signal.h>
#include <stdint.h>
#include <ucontext.h>
#include "bf16.h"
#include "tiles.h"

static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

static int64_t count;

int64_t trapped(void) { return count; }

static void emulate(int signal_number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *at = (const uint8_t *)registers[REG_RIP];
    (void)info;
    if (at[0] != 0xc4 || (at[1] & 31) != 2 || (at[3] != 0x49 && at[3] != 0x4b && at[3] != 0x5c)) {
        signal(signal_number, SIG_DFL); /* not one of ours: it comes again, and ends the process */
        return;
    }
    int x = ~at[1] >> 6 & 1, b = ~at[1] >> 5 & 1, third = ~at[2] >> 3 & 15, prefix = at[2] & 3;
    int mode = at[4] >> 6, reg = at[4] >> 3 & 7, rm = at[4] & 7;
    const uint8_t *end = at + 5;
    char *address = NULL;
    int64_t index = 0;
    if (mode != 3) {
        int base = rm;
        if (rm == 4) {
            int i = (*end >> 3 & 7) | x << 3;
            base = *end & 7;
            if (i != 4) index = (int64_t)registers[REGISTERS[i]] << (*end >> 6);
            end++;
        }
        tile_check(mode != 0 || base != 5);
        address = (char *)registers[REGISTERS[base | b << 3]];
        if (mode == 1) address += (int8_t)*end, end += 1;
        if (mode == 2) {
            int32_t offset;
            memcpy(&offset, end, 4);
            address += offset, end += 4;
        }
    }
    if (at[3] == 0x49 && prefix == 0 && mode != 3) tile_configure((TileConfig *)(address + index));
    else if (at[3] == 0x49 && prefix == 0) tile_release();
    else if (at[3] == 0x49 && prefix == 3) tile_zero(reg);
    else if (at[3] == 0x4b && prefix == 3) tile_load(reg, address, index);
    else if (at[3] == 0x4b && prefix == 2) tile_store(reg, address, index);
    else if (at[3] == 0x5c && prefix == 2) tile_dot_bf16(reg, rm, third);
    else abort();
    count++;
    registers[REG_RIP] = (greg_t)end;
}

static struct sigaction before;

void trap(void) {
    struct sigaction action = {.sa_sigaction = emulate, .sa_flags = SA_SIGINFO};
    sigaction(SIGILL, &action, &before);
}

void untrap(void) { sigaction(SIGILL, &before, NULL); }
