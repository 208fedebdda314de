/* The kernels for any processor. */
#include "vec_portable.h"

#define TW_TABLE tw_portable
#include "template.h"
