// Comparison of results with the reference, and the count of failures that ends the program.
//
// `within`: no number is off by more than its own bound; NaN never passes. `close`: root mean square of the differences
// over that of the reference, sharper where there are many numbers. `untouched`: rows that nobody holds still carry the
// poison that was there before the launch.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace verdict {

inline int failures;
inline std::string where;
inline std::map<std::string, double> largest;  // share of its bound that a number of each table came to

inline void refuse(const std::string& what) {
    ++failures;
    printf("FAILED %s: %s\n", where.c_str(), what.c_str());
}

// The numbers at `places` together.
template <class Result>
void close(const char* what, const std::vector<size_t>& places, Result result, const std::vector<double>& right,
           double tolerance) {
    double difference = 0, size = 0;
    for (size_t i : places) {
        const double x = result(i), y = right[i];
        difference += (x - y) * (x - y), size += y * y;
    }
    const double error = difference == 0 ? 0 : std::sqrt(difference / std::max(size, 1e-30));
    if (error <= tolerance) return;
    char text[160];
    snprintf(text, sizeof text, "%s is off by %.2e, tolerance %.0e", what, error, tolerance);
    refuse(text);
}

// Each `result` of `expected`, for the numbers at `places`. An infinity is right or wrong.
template <class Result, class Expected>
void within(const char* what, const std::vector<size_t>& places, Result result, const Expected& expected) {
    constexpr double kSmallest = 1e-30;  // below, f32 ends
    for (size_t i : places) {
        const double x = result(i), y = expected.right[i], off = expected.off[i] + kSmallest;
        if (std::isinf(y) && x == y) continue;
        const double share = std::abs(x - y) / off;
        if (!(share <= 1)) {
            char text[160];
            snprintf(text, sizeof text, "%s, number %zu: %.9g, right is %.9g within %.2e", what, i, x, y, off);
            return refuse(text);
        }
        largest[what] = std::max(largest[what], share);
    }
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
