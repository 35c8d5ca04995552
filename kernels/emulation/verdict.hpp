// Comparison of results with the reference, and the count of failures that ends the program.
//
// `close`: root mean square of the differences over that of the reference, NaN and infinities never pass. `untouched`:
// rows that nobody holds still carry the poison that was there before the launch.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace verdict {

inline int failures;
inline std::string where;

inline void refuse(const std::string& what) {
    ++failures;
    printf("FAILED %s: %s\n", where.c_str(), what.c_str());
}

// `result` and `reference` give number i of n.
template <class Result, class Expected>
double close(const char* what, size_t n, Result result, Expected reference, double tolerance) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; ++i) {
        const double x = result(i), y = reference(i);
        if (std::isinf(y) && x == y) continue;
        difference += (x - y) * (x - y), size += y * y;
    }
    const double error = difference == 0 ? 0 : std::sqrt(difference / std::max(size, 1e-30));
    if (!(error <= tolerance)) {
        char text[160];
        snprintf(text, sizeof text, "%s is off by %.2e, tolerance %.0e", what, error, tolerance);
        refuse(text);
    }
    return error;
}

template <class T>
void same_bits(const char* what, const std::vector<T>& a, const std::vector<T>& b) {
    if (a.size() != b.size() || memcmp(a.data(), b.data(), a.size() * sizeof(T)) != 0) {
        refuse(std::string(what) + " has other bits");
    }
}

// Rows of `width` numbers for which `held` is 0 are still `poison`.
template <class T>
void untouched(const char* what, const std::vector<T>& rows, size_t width, const std::vector<char>& held, T poison) {
    for (size_t i = 0; i < rows.size(); ++i) {
        if (!held[i / width] && memcmp(&rows[i], &poison, sizeof(T)) != 0) {
            return refuse(std::string(what) + " was written in row " + std::to_string(i / width) +
                          ", which nobody holds");
        }
    }
}

}  // namespace verdict
