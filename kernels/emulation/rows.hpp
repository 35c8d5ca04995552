// rows.cu once, for the checks that include it.
#pragma once
#include "rows.cu"
