// Checks the GPU kernels' own source on an emulated GPU, against f64.
//
// Usage: emulation [portable-]PASS[-softcap] [DIM [SEEDS [SHAPE…]]], PASS forward or backward; emulation rows
// The Hopper kernels, or the portable ones. DIM 0: all head dims; SEEDS: 0 to SEEDS−1, default 3. SHAPE: a name of
// shapes.hpp, or `random N`, drawn by seed N.
// Out: one line a failure of the first seed that has some, what share of its bound any number came to, and a last line
// with the count; exit code 0 if there is none,
// 1 if there are, 3 when the emulated machine stops (deadlock, misuse of a primitive). With -DCADRE_DIM=64 only that
// head dim is compiled, with -DCADRE_CAP=Plain or Softcap only those kernels, with -DCADRE_FAMILY=Hopper or Portable
// only that family.
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

struct Part {
    std::string name;
    bool portable, backward, capped;
};
// What a word asks for; no name where it asks for nothing.
Part part_of(std::string word) {
    constexpr char kFamily[] = "portable-", kCap[] = "-softcap";
    Part part{word, false, false, false};
    if (word.rfind(kFamily, 0) == 0) part.portable = true, word.erase(0, strlen(kFamily));
    const size_t cap = word.find(kCap);
    if (cap != std::string::npos && cap + strlen(kCap) == word.size()) part.capped = true, word.erase(cap);
    part.backward = word == "backward";
    if (!part.backward && word != "forward") part.name.clear();
    return part;
}

template <class Family, int D, class Cap>
void run(const Part& part, int dim, const shapes::Shape& shape, int seeds) {
    const shapes::Batch batch(shape, dim, Cap::capped ? kSoftcap : 0.f);
    const shapes::Reference expected = shapes::reference(batch);
    // A drawn shape has one seed of stalls, that drew it.
    const int first = shape.drawn ? (int)(shape.data % 1000) : 0;
    for (int seed = first; seed < first + (shape.drawn ? 1 : seeds) && !verdict::failures; ++seed) {
        verdict::where =
            part.name + ", dim " + std::to_string(dim) + ", seed " + std::to_string(seed) + ", " + shape.name;
#ifndef CADRE_ONLY_BACKWARD
        if (!part.backward) forward_check::check<Family, D, Cap>(batch, expected, seed, seed % 2);
#endif
#ifndef CADRE_ONLY_FORWARD
        if (part.backward) backward_check::check<Family, D, Cap>(batch, expected, seed);
#endif
    }
}

template <class Family, class Cap>
void run_dim(const Part& part, int dim, const shapes::Shape& shape, int seeds) {
#ifdef CADRE_DIM
    if (families::kernel_dim(dim) == CADRE_DIM) run<Family, CADRE_DIM, Cap>(part, dim, shape, seeds);
#else
    if (families::kernel_dim(dim) == 64) run<Family, 64, Cap>(part, dim, shape, seeds);
    if (families::kernel_dim(dim) == 128) run<Family, 128, Cap>(part, dim, shape, seeds);
    if (families::kernel_dim(dim) == 256) run<Family, 256, Cap>(part, dim, shape, seeds);
#endif
}

template <class Family>
void run_family(const Part& part, int dim, const shapes::Shape& shape, int seeds) {
#ifdef CADRE_CAP
    if (part.capped == cadre::CADRE_CAP::capped) run_dim<Family, cadre::CADRE_CAP>(part, dim, shape, seeds);
#else
    part.capped ? run_dim<Family, cadre::Softcap>(part, dim, shape, seeds)
                : run_dim<Family, cadre::Plain>(part, dim, shape, seeds);
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
    const std::string first = count > 1 ? words[1] : "";
    const Part part = part_of(first);
    if (part.name.empty() && first != "rows") {
        fprintf(stderr, "usage: emulation [portable-]forward|backward[-softcap] [DIM [SEEDS [SHAPE…]]], or rows\n");
        return 2;
    }
    const int dim = count > 2 ? atoi(words[2]) : 0, seeds = count > 3 ? atoi(words[3]) : 3;
    // The Hopper kernels have a head dim each.
    if (dim % 8 || dim > 256 || (dim && !part.portable && families::kernel_dim(dim) != dim)) {
        fprintf(stderr, "no kernel of %s takes head dim %d\n", first.c_str(), dim);
        return 2;
    }
    int checks = first == "rows" ? rows_check::check(seeds) : 0;
    for (const shapes::Shape& shape : chosen(words + std::min(count, 4), words + count)) {
        if (first == "rows") break;
        for (int d : dim ? std::vector<int>{dim} : std::vector<int>{64, 128, 256}) {
#ifdef CADRE_FAMILY
            run_family<families::CADRE_FAMILY>(part, d, shape, seeds);
#else
            part.portable ? run_family<families::Portable>(part, d, shape, seeds)
                          : run_family<families::Hopper>(part, d, shape, seeds);
#endif
            checks += shape.drawn ? 1 : seeds;
        }
    }
    for (const auto& [what, share] : verdict::largest) printf("%s came to %.2f of its bound\n", what.c_str(), share);
    printf("%s: %d checks, %d failures\n", first.c_str(), checks, verdict::failures);
    return verdict::failures || !checks ? 1 : 0;
}
