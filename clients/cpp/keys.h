// Keys of the cache. The specification is protos/kvsidecar/cache/v1/chunk.proto.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvsidecar/cache/v1/chunk.pb.h"

namespace kvsidecar {

using Hash = std::array<uint8_t, 32>;
using Tokens = std::vector<uint32_t>;

// Hash input of a namespace id: one line per field, in the order of field numbers.
std::string canonical_encoding(const cache::v1::NamespaceDescriptor& descriptor);
// Id of everything that determines a chunk's bytes.
Hash namespace_id(const cache::v1::NamespaceDescriptor& descriptor);
// The root of a tenant's chunks in a namespace.
Hash tenant_root(const Hash& name_space, std::string_view salt);
// Id of a tenant across namespaces.
Hash tenant_id(std::string_view salt);
// Id of a chunk together with its whole prefix; the first chunk's parent is the tenant root.
Hash prefix_hash(const Hash& parent, const Tokens& tokens);
// Id of a chunk's tokens, independent of their position.
Hash content_hash(const Hash& root, const Tokens& tokens);
// Key of a prompt's first tokens in the index summary.
Hash head_hash(const Hash& root, const Tokens& tokens);
// XXH3-64 of a payload.
uint64_t checksum(std::string_view payload);
// Lower-case hexadecimal.
std::string hex(std::string_view bytes);
std::string hex(const Hash& hash);

}  // namespace kvsidecar
