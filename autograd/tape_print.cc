#include <ostream>

#include "autograd/tape.h"

namespace tapeline {

void Tape::print(std::ostream& out) const {
  for (size_t i = 0; i < state_->nodes.size(); ++i) {
    const Node* node = state_->nodes[i];
    if (node == nullptr) continue;
    out << i << "  " << node->name << "  " << layer_path(node->scope) << "  "
        << node->output_shape << "  saved " << node->saved_bytes << " bytes\n";
  }
}

}  // namespace tapeline
