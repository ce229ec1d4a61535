package kvsidecar

import (
	"fmt"
	"math"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// refuseNegative refuses numbers that were negative before a uint32(n) conversion: -3 would become 4294967293, which
// limits nothing. So it refuses all values that exceed an int32, except a max_tokens that requests the rest of the
// context.
func refuseNegative(message protoreflect.Message) error {
	var found error
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap():
		case field.IsList():
			for i, list := 0, value.List(); i < list.Len() && found == nil; i++ {
				found = refuseNegativeValue(field, list.Get(i))
			}
		default:
			found = refuseNegativeValue(field, value)
		}
		return found == nil
	})
	return found
}

func refuseNegativeValue(field protoreflect.FieldDescriptor, value protoreflect.Value) error {
	switch {
	case field.Kind() == protoreflect.MessageKind:
		return refuseNegative(value.Message())
	case field.Kind() != protoreflect.Uint32Kind || value.Uint() <= math.MaxInt32:
	case field.Name() == "max_tokens" && value.Uint() == RestOfContext:
	default:
		return refusal(fmt.Sprintf("%s is %d (%d as an int32); whole numbers from %d to %d are allowed",
			field.Name(), value.Uint(), int32(value.Uint()), least(field), math.MaxInt32))
	}
	return nil
}

// RestOfContext as MaxTokens allows an answer to fill the rest of the context.
const RestOfContext = math.MaxUint32

func least(field protoreflect.FieldDescriptor) int {
	switch field.Name() {
	case "max_tokens", "ttl_seconds", "retain_seconds":
		return 1
	}
	return 0
}
