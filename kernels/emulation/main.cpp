// Checks the GPU kernels' own source on an emulated GPU, against f64.
//
// Usage: emulation forward|backward|rows [DIM [SEEDS [SHAPE…]]]   DIM 0: all head dims; SEEDS: 0 to SEEDS−1, default 3
// Out: one line a failure of the first seed that has some and a last line with the count; exit code 0 if there is none,
// 1 if there are, 3 when the emulated machine stops (deadlock, misuse of a primitive). With -DCADRE_DIM=64 only that
// head dim is compiled.
#include <algorithm>

// A planted bug needs one kernel only.
#ifndef CADRE_ONLY_BACKWARD
#include "forward_check.hpp"
#endif
#ifndef CADRE_ONLY_FORWARD
#include "backward_check.hpp"
#endif
#include "rows_check.hpp"

namespace {

template <int D>
void run(const std::string& part, const shapes::Shape& shape, int seeds) {
    const shapes::Batch batch(shape, D, 1);
    const shapes::Reference expected = shapes::reference(batch);
    for (int seed = 0; seed < seeds && !verdict::failures; ++seed) {
        verdict::where = part + ", dim " + std::to_string(D) + ", seed " + std::to_string(seed) + ", " + shape.name;
#ifndef CADRE_ONLY_BACKWARD
        if (part == "forward") forward_check::check<D>(batch, expected, seed, seed == 1);
#endif
#ifndef CADRE_ONLY_FORWARD
        if (part == "backward") backward_check::check<D>(batch, expected, seed);
#endif
    }
}

void run_dim(int dim, const std::string& part, const shapes::Shape& shape, int seeds) {
#ifdef CADRE_DIM
    if (dim == CADRE_DIM) run<CADRE_DIM>(part, shape, seeds);
#else
    if (dim == 64) run<64>(part, shape, seeds);
    if (dim == 128) run<128>(part, shape, seeds);
    if (dim == 256) run<256>(part, shape, seeds);
#endif
}

}  // namespace

int main(int count, char** words) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const std::string part = count > 1 ? words[1] : "";
    if (part != "forward" && part != "backward" && part != "rows") {
        fprintf(stderr, "usage: emulation forward|backward|rows [DIM [SEEDS [SHAPE…]]]\n");
        return 2;
    }
    const int dim = count > 2 ? atoi(words[2]) : 0, seeds = count > 3 ? atoi(words[3]) : 3;
    int checks = part == "rows" ? rows_check::check(seeds) : 0;
    for (const shapes::Shape& shape : shapes::all()) {
        if (part == "rows") break;
        if (count > 4 && std::find(words + 4, words + count, shape.name) == words + count) continue;
        for (int d : {64, 128, 256}) {
            if (dim != 0 && dim != d) continue;
            run_dim(d, part, shape, seeds);
            checks += seeds;
        }
    }
    printf("%s: %d checks, %d failures\n", part.c_str(), checks, verdict::failures);
    return verdict::failures || !checks ? 1 : 0;
}
