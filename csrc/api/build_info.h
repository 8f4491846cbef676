// What the library was built for and with, as a JSON object: {"archs": [...], "cuda": "13.0", "torch": "2.11.0"}.
#pragma once

#include <string>

std::string build_info();
