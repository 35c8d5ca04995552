// Matrix products of a warpgroup: wgmma m64nNk16, bf16 in, f32 out, and the descriptors of its shared operands.
//
// D[64×N] = A[64×16]·B[16×N], plus D unless `keep` is 0. D is a fragment: thread t of the warpgroup holds, for each
// block of 8 columns j, D[r][c], D[r][c+1], D[r+8][c], D[r+8][c+1] at d[4j..4j+3] with r = 16·(t/32) + t%32/4, c = 8j +
// 2·(t%4). A as registers: 4 words, pairs of bf16 in the order of that fragment's two blocks. TA, TB: 0 for operands
// whose K runs along a row of the panel (K-major), 1 for those whose M or N does.
//
// N is that of the array: 32, 64, 128 (both operands shared), 64, 128, 256 (A in registers). Between `wgmma_begin` and
// the wait that covers a product, nobody touches its registers or writes its operands; and no branch: the compiler
// would serialise all of them (warning C7512). Included by ptx.cuh only.
#pragma once

namespace ptx {

// An operand at `address` (16-byte units inside 256 KiB). `panel_stride`: bytes between panels, for MN-major operands
// wider than one panel; `group_stride`: bytes between groups of 8 rows, 1024 in a dense panel. Adding n moves by 16·n
// bytes.
DEVICE uint64_t descriptor(uint32_t address, uint32_t panel_stride, uint32_t group_stride = 1024) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | ((uint64_t)(panel_stride >> 4) << 16) |
           ((uint64_t)(group_stride >> 4) << 32) | (1ull << 62);
}

DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `Open` committed groups are unfinished.
template <int Open>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Open) : "memory");
}

#define OUT4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT16(d, i) OUT4(d, i), OUT4(d, i + 4), OUT4(d, i + 8), OUT4(d, i + 12)
#define OUT32(d, i) OUT16(d, i), OUT16(d, i + 16)
#define OUT64(d, i) OUT32(d, i), OUT32(d, i + 32)
#define OUT128(d, i) OUT64(d, i), OUT64(d, i + 64)
#define LIST16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LIST32                                               \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LIST64                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"           \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LIST128                                                                    \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                       \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"             \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"             \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"             \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"             \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"             \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// N, registers, then the numbers of the operands behind the registers.
#define WGMMA_SHARED(N, R, A, B, KEEP, TA_, TB_)                                                            \
    template <int TA, int TB>                                                                               \
    DEVICE void wgmma(float (&d)[R], uint64_t a, uint64_t b, int keep) {                                    \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" KEEP ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                     "k16.f32.bf16.bf16 {" LIST##R "}, %" A ", %" B ", p, 1, 1, %" TA_ ", %" TB_ ";\n}"     \
                     : OUT##R(d, 0)                                                                         \
                     : "l"(a), "l"(b), "r"(keep), "n"(TA), "n"(TB));                                        \
    }
WGMMA_SHARED(32, 16, "16", "17", "18", "19", "20")
WGMMA_SHARED(64, 32, "32", "33", "34", "35", "36")
WGMMA_SHARED(128, 64, "64", "65", "66", "67", "68")
#undef WGMMA_SHARED

#define WGMMA_REGISTERS(N, R, A0, A1, A2, A3, B, KEEP, TB_)                                                       \
    template <int TB>                                                                                             \
    DEVICE void wgmma(float (&d)[R], const uint32_t* a, uint64_t b, int keep) {                                   \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" KEEP ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N       \
                     "k16.f32.bf16.bf16 {" LIST##R "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" B ", p, 1, 1, %" TB_ \
                                                   ";\n}"                                                         \
                     : OUT##R(d, 0)                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(TB));                   \
    }
WGMMA_REGISTERS(64, 32, "32", "33", "34", "35", "36", "37", "38")
WGMMA_REGISTERS(128, 64, "64", "65", "66", "67", "68", "69", "70")
WGMMA_REGISTERS(256, 128, "128", "129", "130", "131", "132", "133", "134")
#undef WGMMA_REGISTERS

}  // namespace ptx
