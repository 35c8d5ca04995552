// Entry points of the kernels that move rows; everything about them is in rows.cuh.
#include "rows.cuh"

#define CADRE_ROWS(NAME, PARAMETERS)                                              \
    CONSTANT cadre::Launch cadre_##NAME##_launch = {cadre::kRowThreads, 0, 0, 0}; \
    ELEMENTWISE(cadre::kRowThreads) cadre_##NAME(const __grid_constant__ cadre::PARAMETERS p) { cadre::NAME(p); }

CADRE_ROWS(merge, MergeParameters)
CADRE_ROWS(finish_dq, FinishParameters)
CADRE_ROWS(sink, SinkParameters)
CADRE_ROWS(copy_rows_16, Copy16Parameters)
CADRE_ROWS(copy_rows_4, Copy4Parameters)
