// Entry points of the kernels that move rows; everything about them is in rows.cuh.
#include "rows.cuh"

ELEMENTWISE(cadre::kRowThreads) cadre_merge(const __grid_constant__ cadre::MergeParameters p) { cadre::merge(p); }
ELEMENTWISE(cadre::kRowThreads) cadre_finish_dq(const __grid_constant__ cadre::FinishParameters p) {
    cadre::finish_dq(p);
}
