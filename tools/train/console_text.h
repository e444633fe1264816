// Text for people at a terminal.
#pragma once

#include <string>
#include <vector>

namespace tapeline {

// The command of these words, as a shell reads it back, with --resume.
std::string resume_command(const std::vector<std::string>& words);

// Bytes that a terminal should not get become '?'.
std::string printable(std::string text);

}  // namespace tapeline
