#include "api/build_info.h"

#include <sstream>

// Given by the build: FLA_KDA_ARCHS such as "80,90a", FLA_KDA_CUDA_VERSION, FLA_KDA_TORCH_VERSION.
std::string build_info() {
    std::ostringstream json;
    json << "{\"archs\": [";
    std::istringstream archs(FLA_KDA_ARCHS);
    std::string arch;
    for (const char* separator = ""; std::getline(archs, arch, ','); separator = ", ") {
        json << separator << '"' << arch << '"';
    }
    json << "], \"cuda\": \"" << FLA_KDA_CUDA_VERSION << "\", \"torch\": \"" << FLA_KDA_TORCH_VERSION << '"';
#ifdef KDA_FOR_RACECHECK
    json << ", \"for_racecheck\": true}";
#else
    json << ", \"for_racecheck\": false}";
#endif
    return json.str();
}
