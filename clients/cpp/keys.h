// Names of things in the cache. The specification is protos/kvsidecar/cache/v1/chunk.proto.
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

// What a namespace is the hash of: a line for each field, in the order of field numbers.
std::string canonical_encoding(const cache::v1::NamespaceDescriptor& descriptor);
// Names everything that decides a chunk's bytes.
Hash namespace_id(const cache::v1::NamespaceDescriptor& descriptor);
// The root of a tenant's chunks in a namespace.
Hash tenant_root(const Hash& name_space, std::string_view salt);
// Names a tenant in all namespaces.
Hash tenant_id(std::string_view salt);
// Names a chunk together with everything before it; the first chunk's parent is the tenant root.
Hash prefix_hash(const Hash& parent, const Tokens& tokens);
// Names a chunk's tokens wherever they stand.
Hash content_hash(const Hash& root, const Tokens& tokens);
// What the index summary knows a prompt's beginning by.
Hash head_hash(const Hash& root, const Tokens& tokens);
// XXH3-64 of a payload.
uint64_t checksum(std::string_view payload);
// Lower-case hexadecimal.
std::string hex(std::string_view bytes);
std::string hex(const Hash& hash);

}  // namespace kvsidecar
