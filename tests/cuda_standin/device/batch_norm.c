// cuDNN's batch norm as launches, one each. Of its many arguments none is read, so cudnn.h is left out.
#include "standin.h"

EXPORT int cudnnBatchNormalizationForwardTrainingEx() { return standin_count_launch(), 0; }
EXPORT int cudnnBatchNormalizationForwardInference() { return standin_count_launch(), 0; }
EXPORT int cudnnBatchNormalizationBackwardEx() { return standin_count_launch(), 0; }
