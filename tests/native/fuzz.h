// One random call of each kernel; throws Failure where the kernel breaks its contract.
#pragma once

#include "draw.h"

namespace fuzz {

void norm_conv(Draw& draw);
void direct_conv(Draw& draw);
void norm_pass(Draw& draw);
void layout(Draw& draw);
void codec(Draw& draw);
void gradient_sweeps(Draw& draw);
void max_pool(Draw& draw);
void features(Draw& draw);

}  // namespace fuzz
