// Checks the GPU kernels' own source on an emulated GPU, against f64.
//
// Usage: emulation forward|backward|rows|forward-softcap|backward-softcap [DIM [SEEDS [SHAPE…]]]
// DIM 0: all head dims; SEEDS: 0 to SEEDS−1, default 3. SHAPE: a name of shapes.hpp, or `random N`, drawn by seed N.
// Out: one line a failure of the first seed that has some, what share of its bound any number came to, and a last line
// with the count; exit code 0 if there is none,
// 1 if there are, 3 when the emulated machine stops (deadlock, misuse of a primitive). With -DCADRE_DIM=64 only that
// head dim is compiled, with -DCADRE_CAP=Plain or Softcap only those kernels.
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

// Scores are about 1, so that this bends all and flattens some.
constexpr float kSoftcap = 2.f;

template <int D, class Cap>
void run(const std::string& part, const shapes::Shape& shape, int seeds) {
    const shapes::Batch batch(shape, D, Cap::capped ? kSoftcap : 0.f);
    const shapes::Reference expected = shapes::reference(batch);
    // A drawn shape has one seed of stalls, that drew it.
    const int first = shape.drawn ? (int)(shape.data % 1000) : 0;
    for (int seed = first; seed < first + (shape.drawn ? 1 : seeds) && !verdict::failures; ++seed) {
        verdict::where = part + ", dim " + std::to_string(D) + ", seed " + std::to_string(seed) + ", " + shape.name;
#ifndef CADRE_ONLY_BACKWARD
        if (part.rfind("forward", 0) == 0) forward_check::check<D, Cap>(batch, expected, seed, seed % 2);
#endif
#ifndef CADRE_ONLY_FORWARD
        if (part.rfind("backward", 0) == 0) backward_check::check<D, Cap>(batch, expected, seed);
#endif
    }
}

template <class Cap>
void run_dim(int dim, const std::string& part, const shapes::Shape& shape, int seeds) {
#ifdef CADRE_DIM
    if (dim == CADRE_DIM) run<CADRE_DIM, Cap>(part, shape, seeds);
#else
    if (dim == 64) run<64, Cap>(part, shape, seeds);
    if (dim == 128) run<128, Cap>(part, shape, seeds);
    if (dim == 256) run<256, Cap>(part, shape, seeds);
#endif
}

// All that are listed where none is named.
std::vector<shapes::Shape> chosen(char** begin, char** end) {
    std::vector<shapes::Shape> shapes = shapes::all(), found;
    if (begin == end) return shapes;
    for (const shapes::Shape& shape : shapes) {
        if (std::find(begin, end, shape.name) != end) found.push_back(shape);
    }
    constexpr char kRandom[] = "random ";
    for (char** it = begin; it != end; ++it) {
        if (!strncmp(*it, kRandom, strlen(kRandom))) {
            found.push_back(shapes::drawn(strtoull(*it + strlen(kRandom), nullptr, 10)));
        }
    }
    return found;
}

}  // namespace

int main(int count, char** words) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const std::string part = count > 1 ? words[1] : "";
    const bool capped = part == "forward-softcap" || part == "backward-softcap";
    if (part != "forward" && part != "backward" && part != "rows" && !capped) {
        fprintf(stderr,
                "usage: emulation forward|backward|rows|forward-softcap|backward-softcap [DIM [SEEDS [SHAPE…]]]\n");
        return 2;
    }
    const int dim = count > 2 ? atoi(words[2]) : 0, seeds = count > 3 ? atoi(words[3]) : 3;
    int checks = part == "rows" ? rows_check::check(seeds) : 0;
    for (const shapes::Shape& shape : chosen(words + std::min(count, 4), words + count)) {
        if (part == "rows") break;
        for (int d : {64, 128, 256}) {
            if (dim != 0 && dim != d) continue;
#ifdef CADRE_CAP
            if (capped == cadre::CADRE_CAP::capped) run_dim<cadre::CADRE_CAP>(d, part, shape, seeds);
#else
            capped ? run_dim<cadre::Softcap>(d, part, shape, seeds) : run_dim<cadre::Plain>(d, part, shape, seeds);
#endif
            checks += shape.drawn ? 1 : seeds;
        }
    }
    for (const auto& [what, share] : verdict::largest) printf("%s came to %.2f of its bound\n", what.c_str(), share);
    printf("%s: %d checks, %d failures\n", part.c_str(), checks, verdict::failures);
    return verdict::failures || !checks ? 1 : 0;
}
